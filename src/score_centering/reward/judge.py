"""Is an answer equivalent to the gold answer? math_verify decides; a yes it is known to give wrongly is refused.

Runs in worker processes only: nothing here has a deadline. A refusal only ever turns a yes into a no, since a reward
for a wrong answer teaches it, while one withheld only slows learning. `docs/data-and-reward.md` lists the refusals.
"""

import functools
import logging

from math_verify import LatexExtractionConfig, parse, verify
from sympy import nan, zoo

from score_centering.reward import grammar
from score_centering.reward.answers import literals_equal, one_spelling
from score_centering.reward.refusals import Parsed, refusal
from score_centering.reward.refutation import clearly_different

MAX_PARSED_CHARS = 1000
MAX_DEPTH = 20

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
grammar.install()


class UnparsableGoldError(ValueError):
    """The gold answer is no math that an answer could be compared with."""


def judge(answer: str, gold: str) -> bool:
    """Whether `answer`, the content of a box, is equivalent to `gold`. Raises `UnparsableGoldError`."""
    answer, gold = one_spelling(answer), one_spelling(gold)
    equal = literals_equal(answer, gold)
    return compare(answer, gold) if equal is None else equal


def is_gold(text: str) -> bool:
    """Whether `text` can be a gold answer: it parses, and it is judged equivalent to itself."""
    try:
        return judge(text, text)
    except UnparsableGoldError:
        return False


def compare(answer: str, gold: str) -> bool:
    """`judge` without the short cut for written-out numbers."""
    parsed_gold = _parse_gold(gold)
    parsed = _parse(answer) if _readable(answer) else None
    if parsed is None or clearly_different(parsed.expression, parsed_gold.expression):
        return False
    equivalent = verify([parsed_gold.expression], [parsed.expression], timeout_seconds=None)
    return equivalent and refusal(parsed, parsed_gold) is None


def _readable(text: str) -> bool:
    """Whether `text` is short, flat and printable enough to be worth parsing; real answers are, by a wide margin."""
    return 0 < len(text) <= MAX_PARSED_CHARS and text.isprintable() and _depth(text) <= MAX_DEPTH


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


@functools.lru_cache(maxsize=256)
def _parse_gold(gold: str) -> Parsed:
    parsed = _parse(gold) if _readable(gold) else None
    if parsed is None or parsed.expression in (nan, zoo):
        raise UnparsableGoldError(f"gold answer {gold[:80]!r} is no math that an answer could be compared with")
    return parsed


def _parse(text: str) -> Parsed | None:
    """`text` as math_verify reads it, or None where it reads no math."""
    read = parse(rf"\boxed{{{text}}}", _CONFIG, parsing_timeout=None)
    if not read or isinstance(read[0], str):
        return None
    return Parsed(text, next((item for item in read if isinstance(item, str)), ""), read[0])
