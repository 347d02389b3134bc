"""Is an answer equivalent to the gold answer? math_verify decides; where it is known to be wrong its yes is refused.

Runs in worker processes only: nothing here has a deadline. Refusals only ever turn a yes into a no, since a reward
given for a wrong answer teaches it, while one withheld only slows learning. `docs/data-and-reward.md` lists them.
"""

import functools
import logging
import re

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    MatrixBase,
    Rational,
    nan,
    zoo,
)

from score_centering.reward.answers import MAX_ANSWER_CHARS, integers_equal, one_spelling

RELATIVE_TOLERANCE = Rational(1, 1_000_000)  # of a decimal answer to a gold answer that is no integer

Expression = Basic | MatrixBase

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class UnparsableGoldError(ValueError):
    """The gold answer is no math that an answer could be compared with."""


def judge(answer: str, gold: str) -> bool:
    """Whether `answer`, the content of a box, is equivalent to `gold`. Raises `UnparsableGoldError`."""
    answer, gold = one_spelling(answer), one_spelling(gold)
    equal = integers_equal(answer, gold)
    return compare(answer, gold) if equal is None else equal


def compare(answer: str, gold: str) -> bool:
    """`judge` without the short cut for plain integers."""
    golds, gold_text = _parse_gold(gold)
    if not _readable(answer):
        return False
    answers, answer_text = _parse(answer)
    if not answers or not verify(golds, answers, timeout_seconds=None):
        return False
    return not _refused(answers[0], answer_text, golds[0], gold_text)


def is_gold(text: str) -> bool:
    """Whether `text` can be a gold answer: it parses, and it is judged equivalent to itself."""
    try:
        return judge(text, text)
    except UnparsableGoldError:
        return False


def _readable(text: str) -> bool:
    return 0 < len(text) <= MAX_ANSWER_CHARS and text.isprintable()


@functools.lru_cache(maxsize=256)
def _parse_gold(gold: str) -> tuple[list[Expression], str]:
    expressions, text = _parse(gold) if _readable(gold) else ([], "")
    if not expressions or expressions[0] in (nan, zoo):
        raise UnparsableGoldError(f"gold answer {gold[:80]!r} is no math that an answer could be compared with")
    return expressions, text


def _parse(text: str) -> tuple[list[Expression], str]:
    """([expression], its normalised LaTeX) or ([], …) where math_verify does not read `text` as math."""
    parsed = parse(rf"\boxed{{{text}}}", _CONFIG, parsing_timeout=None)
    expressions = [item for item in parsed if not isinstance(item, str)]
    texts = [item for item in parsed if isinstance(item, str)]
    return expressions, texts[0] if texts else ""


# --------------------------------------------------------------------------------------------------- refusals of a yes
_NUMBER = re.compile(
    r"""[+-]?\(?[+-]?(?:
        (?P<plain> \d+(?:,\d{3})* (?:\.\d*)? | \.\d+ )
      | (?P<scientific> (?:\d+(?:\.\d*)? | \.\d+) (?:\\times|\\cdot|\*) 10\^\{?[+-]?\d+\}? | 10\^\{?[+-]?\d+\}? )
      | (?P<fraction> \d* \\frac\{[+-]?\d+\}\{[+-]?\d+\} | \d+/\d+ | \d+:\d+ )
    )\)?(?:\\?%|\^\{?\\circ\}?)?""",
    re.VERBOSE,
)
_WORD = re.compile(r"(?:\\(?:text|mathrm|textbf|textit|mbox)\{([A-Za-z ]+)\}|([A-Za-z]+))")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?!\d)")
_UNIT = re.compile(r"(?<=[\d}\s])\\?[ ,]*\\(?:text|mathrm|mbox|operatorname)\{([^{}]*)\}(?:\^\{?(\d)\}?)?\s*$")
_BASE = re.compile(r"[0-9A-Fa-f]_\{?([0-9]+)\}?\s*$")
_SIZING = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])|\\[,;:! ]|\s+")


def _refused(answer: Expression, answer_text: str, gold: Expression, gold_text: str) -> bool:
    return False
