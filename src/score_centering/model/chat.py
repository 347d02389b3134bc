"""From a problem to the prompt's token ids and from a response's ids to its text: the one way for warm start,
validation and training."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from score_centering.data.problems import user_message
from score_centering.reward.answers import THINK_CLOSE, THINK_OPEN
from score_centering.rollout import Rollout
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json

TAIL_TOKENS = 16  # more than the end of any generation prompt
_TURN = "Turn"  # what a turn holds that is only rendered to see how it ends


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


def thinking_is_open(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends by opening the thinking, so that the response begins inside it."""
    tail = tokenizer.decode(list(prompt_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
    return tail.rstrip().endswith(THINK_OPEN)


def response_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text of a response without special tokens, but with the tags of the thinking, special or not."""
    parts, start = [], 0
    added = tokenizer.added_tokens_decoder.items()
    tags = {index: str(token) for index, token in added if token.special and str(token) in (THINK_OPEN, THINK_CLOSE)}
    ids = [int(token) for token in token_ids]
    for index, token in enumerate(ids):
        if token in tags:
            parts += [tokenizer.decode(ids[start:index], skip_special_tokens=True), tags[token]]
            start = index + 1
    return "".join([*parts, tokenizer.decode(ids[start:], skip_special_tokens=True)])


def read_responses(tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout]) -> tuple[list[str], list[bool]]:
    """(text of each response, whether it begins inside the thinking), for the scorer."""
    texts = [response_text(tokenizer, rollout.token_ids) for rollout in rollouts]
    return texts, [thinking_is_open(tokenizer, rollout.prompt_ids.tolist()) for rollout in rollouts]


def generation_eos(folder: Path) -> int | list[int] | None:
    """`eos_token_id` of a model folder's generation_config.json; None where it has none.

    Raises:
        UserError: it is neither a token id nor a list of them.
    """
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    listed = found if isinstance(found, list) else [found] * (found is not None)
    if not all(type(token) is int and token >= 0 for token in listed):
        raise UserError(f"{path}: eos_token_id = {found!r} must be a token id or a list of them")
    return found


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, configured: int | Sequence[int] | None) -> tuple[int, ...]:
    """Ids that end a response: the chat template's end of turn first, then those of generation_config.json
    (`configured`) and the tokenizer's end of sequence.

    Where the template ends a turn with text that is no single token, one line on standard error says so.
    """
    listed = [configured] if configured is None or isinstance(configured, int) else configured
    ids = [_end_of_turn(tokenizer), *listed, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template puts after what the assistant says; None where there is none."""
    turns = [{"role": "user", "content": _TURN}, {"role": "assistant", "content": _TURN}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    except TemplateError:
        return None  # a template that takes no such conversation
    tail = text.rpartition(_TURN)[2].strip()
    if not tail:
        return None
    first = tokenizer.encode(tail, add_special_tokens=False)[0]
    if first in tokenizer.added_tokens_decoder:
        return first
    print(
        f"chat template: ends a turn with {tail[:40]!r}, which is no single token; responses end at "
        f"{tokenizer.eos_token!r} and generation_config.json's tokens only",
        file=sys.stderr,
    )
    return None
