"""Numbers as one writes a result: integers, decimals, fractions, mixed numbers, powers of ten. Exact, not parsed."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal as OneOf

MAX_CHARS = 300  # of a number other than an integer
MAX_EXPONENT = 400
RELATIVE_TOLERANCE = Fraction(1, 10**6)
ABSOLUTE_TOLERANCE = Fraction(1, 2 * 10**6)

_INTEGER = re.compile(r"[+-]?[0-9]+|[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_LITERAL = re.compile(
    r"""(?P<sign>[+-]?)(?:
        (?P<whole>[0-9]+)?\\frac\{(?P<n1>[+-]?[0-9]+)\}\{(?P<d1>[+-]?[0-9]+)\} | (?P<n2>[0-9]+)/(?P<d2>[0-9]+)
      | (?:(?P<decimal>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<times>\\times|\\cdot|\*)?)?
        (?P<ten>(?<![0-9.])10\^(?:\{(?P<e1>[+-]?[0-9]{1,4})\}|(?P<e2>[0-9])))?
    )""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\\[,:; ]|~|\\q?quad(?![a-zA-Z])| ")
_APART = re.compile(r"[0-9,](?:\\[,:; ]|~|\\q?quad(?![a-zA-Z])| )+[0-9]")  # digits apart, or a list


@dataclass(frozen=True)
class Number:
    """A written-out number.

    value: None where it is an integer too long to be more than its digits.
    digits: (negative, digits without leading zeros) of an integer.
    step: what its last digit counts, where it is a decimal.
    """

    form: OneOf["integer", "decimal", "fraction", "power"]
    value: Fraction | None
    digits: tuple[bool, str] = (False, "")
    step: Fraction = Fraction(0)


def number(text: str) -> Number | None:
    """The number that `text`, in one spelling, writes out, or None. Parentheses around it or its digits are none."""
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if len(text) > MAX_CHARS or _APART.search(text):
        return None
    text = _SPACE.sub("", text)
    sign = 1
    while text:
        if re.fullmatch(r"-\([^-+].*\)", text):
            sign, text = -sign, text[2:-1]
        elif text[0] + text[-1] in ("()", "{}"):
            text = text[1:-1]
        else:
            break
        if "," in text:
            return None  # a pair: (1,234)
    return _signed(_plain(text), sign)


def _signed(read: Number | None, sign: int) -> Number | None:
    if read is None or sign > 0:
        return read
    negative = not read.digits[0] and read.digits[1] != ""
    return replace(read, value=None if read.value is None else -read.value, digits=(negative, read.digits[1]))


def _plain(text: str) -> Number | None:
    if _INTEGER.fullmatch(text):
        return _integer(text)
    match = _LITERAL.fullmatch(text)
    if match is None or not text.strip("+-"):
        return None
    sign = -1 if match["sign"] == "-" else 1
    denominator = match["d1"] or match["d2"]
    if denominator is not None:
        if int(denominator) == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["n1"] or match["n2"]), int(denominator))
        return Number("fraction", sign * value)
    if bool(match["times"]) != bool(match["decimal"] and match["ten"]):
        return None
    exponent = int(match["e1"] or match["e2"] or 0) if match["ten"] else 0
    if abs(exponent) > MAX_EXPONENT:
        return None
    digits = (match["decimal"] or "1").replace(",", "")
    unit = Fraction(10) ** exponent
    step = unit / 10 ** len(digits.partition(".")[2])
    return Number("power" if match["ten"] else "decimal", sign * Fraction(digits) * unit, step=step)


def _integer(text: str) -> Number:
    """Integers are compared as digits, since `int` has a limit of them."""
    digits = text.lstrip("+-").replace(",", "").lstrip("0")
    negative = text.startswith("-") and digits != ""
    value = Fraction(("-" if negative else "") + (digits or "0")) if len(text) <= MAX_CHARS else None
    return Number("integer", value, (negative, digits))


def equal_numbers(answer: Number, gold: Number) -> bool:
    """Whether they are equal. Written-out integers and decimals are exact; a decimal may stand for a fraction that
    `close` finds it rounded from. A gold integer is exact."""
    if answer.form == gold.form == "integer":
        return answer.digits == gold.digits
    if answer.value is None or gold.value is None:
        return False
    if answer.value == gold.value:
        return True
    if "fraction" not in (answer.form, gold.form) or answer.form == gold.form or gold.form == "integer":
        return False
    size = max(abs(answer.value), abs(gold.value))
    return close(answer.value - gold.value, size, answer.step + gold.step)


def close(difference: Fraction, size: Fraction, step: Fraction) -> bool:
    """Whether a decimal of this size that is off by `difference` was rounded or cut at its last digit, which counts
    `step`: to no fewer than six digits after the point and to a relative 1e-6."""
    return abs(difference) <= min(step, ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * size)


def literals_equal(answer: str, gold: str) -> bool | None:
    """Whether two written-out numbers are equal and the answer is written as a result; None where a text is none."""
    first, second = number(answer), number(gold)
    if first is None or second is None:
        return None
    return equal_numbers(first, second) and not unfinished(first, second)


def unfinished(answer: Number, gold: Number) -> bool:
    """Whether a division is left to do: a fraction for a whole number."""
    return (
        answer.form == "fraction"
        and gold.form != "fraction"
        and gold.value is not None
        and (gold.value.denominator == 1)
    )
