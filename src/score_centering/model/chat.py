"""From a problem to the prompt's token ids, the one way for warm start, validation and training."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from score_centering.data.problems import user_message


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], enable_thinking: bool = True
) -> list[int]:
    """Token ids of a conversation that the model is to answer, through the tokenizer's chat template."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, instruction: str, enable_thinking: bool = True
) -> list[int]:
    """Token ids of the user message that asks to solve `problem`."""
    return encode_messages(tokenizer, [user_message(problem, instruction)], enable_thinking)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's end-of-sequence token."""
    return (tokenizer.eos_token_id,)
