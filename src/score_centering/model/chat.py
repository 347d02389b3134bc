"""From a problem to the prompt's token ids, the one way for warm start, validation and training."""

from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, instruction: str, enable_thinking: bool = True
) -> list[int]:
    """Token ids of the user message `problem`, line break, `instruction`, through the tokenizer's chat template."""
    message = {"role": "user", "content": f"{problem}\n{instruction}"}
    text = tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    return tokenizer.encode(text, add_special_tokens=False)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's end-of-sequence token."""
    return (tokenizer.eos_token_id,)
