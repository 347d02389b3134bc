"""The text of an answer: the last boxed expression of a response, in one spelling. Knows nothing of math_verify."""

import re
import unicodedata
from fractions import Fraction

MAX_ANSWER_CHARS = 10_000  # a longer boxed expression is no answer; the longest gold answers have a few hundred
MAX_FRACTION_CHARS = 300
SLIGHT = Fraction(1, 100_000)  # relative; a smaller difference is left to the judge

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"

_INTEGER = re.compile(r"[+-]?[0-9]+|-?[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_LITERAL = re.compile(
    r"""[+-]?(?P<decimal>[0-9]+(?:\.[0-9]+)?|\.[0-9]+) | -?(?P<grouped>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?)
      | [+-]?(?:\\[dt]?frac\{(?P<n1>[0-9]+)\}\{(?P<d1>[0-9]+)\}|(?P<n2>[0-9]+)/(?P<d2>[0-9]+))""",
    re.VERBOSE,
)
_SCIENTIFIC = re.compile(r"(?<![0-9A-Za-z.\\}])([0-9]++(?:\.[0-9]++)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![0-9A-Za-z])")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\\[,:;! ]|\{,\}|~| )[0-9]{3})+)(?![0-9])")
_MIXED = re.compile(r"(?<![0-9.,/^_])([0-9]++) ([0-9]++)/([0-9]++)(?![./])")
_REPEATING = re.compile(r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\overline\{([0-9]{1,20})\}(?![0-9])")
_STYLE = re.compile(r"\\(?:bf|rm|it|displaystyle|(?:text)?color\{[a-zA-Z]*\})(?![a-zA-Z]) ?")
_STYLED = re.compile(r"\\(?:boldsymbol|bm|underline)\{([^{}]*)\}")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_SPELLINGS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u00ad", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u3000\t\n\r\f\v", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "±": r"\pm ", "⁄": "/", "∕": "/",
}  # fmt: skip


def final_answer(response: str) -> str | None:
    """What the last `\\boxed{…}` after the thinking holds, or None.

    Only that one counts: a response whose last box is never closed, is empty, or stands inside the thinking has no
    answer, whatever boxes stand before it. Boxes inside the box are opened.
    """
    start = response.rfind(_THINK_CLOSE)
    start = 0 if start < 0 else start + len(_THINK_CLOSE)
    if response.find(_THINK_OPEN, start) >= 0:
        return None
    content = None
    position = start
    while (match := _BOX.search(response, position)) is not None:
        content, position = _braced(response, match.end())
    if content is None or len(content) > MAX_ANSWER_CHARS:
        return None
    return _open_boxes(content).strip() or None


def _braced(text: str, start: int) -> tuple[str | None, int]:
    """(content, position after it) of the brace group that opens at `start`; content is None where it never closes."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : match.start()], match.end()
    return None, len(text)


def _open_boxes(content: str) -> str:
    while (match := _BOX.search(content)) is not None:
        inner, end = _braced(content, match.end())
        if inner is None:
            return ""
        content = content[: match.start()] + inner + content[end:]
    return content


def one_spelling(text: str) -> str:
    """`text` with one spelling for digits, signs, spaces, scientific notation and thousands separators."""
    if not text.isascii():
        text = "".join(_spell(character) for character in _SUPERSCRIPT_RUN.sub(_superscript, text))
    text = " ".join(text.split())
    text = text.removesuffix(".").strip() if not text.endswith("..") else text
    text = _SCIENTIFIC.sub(_scientific, text.replace(r"\varnothing", r"\emptyset"))
    text = _STYLED.sub(r"\1", _STYLE.sub("", text))
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return _SPACED_THOUSANDS.sub(lambda match: match[1] + re.sub("[^0-9]", "", match[2]), text)


def _spell(character: str) -> str:
    spelling = _SPELLINGS.get(character)
    if spelling is not None:
        return spelling
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    return chr(ord(character) - 0xFEE0) if "\uff01" <= character <= "\uff5e" else character


def _superscript(match: re.Match[str]) -> str:
    return "^{" + match[0].translate(_SUPERSCRIPTS) + "}"


def _scientific(match: re.Match[str]) -> str:
    return match[1] + r"\times 10^{" + match[2].removeprefix("+") + "}"


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction that it is."""
    whole, fixed, period = match.groups()
    value = Fraction(
        int(whole + fixed + period) - int("0" + whole + fixed), 10 ** len(fixed + period) - 10 ** len(fixed)
    )
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def literals_equal(answer: str, gold: str) -> bool | None:
    """Whether two written-out numbers are equal; None where a text is none, or where their difference is slight.

    Integers may have any length. Decimals and fractions are compared exactly.
    """
    first, second = _LITERAL.fullmatch(answer), _LITERAL.fullmatch(gold)
    if first is None or second is None:
        return None
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return _integer(answer) == _integer(gold)
    if len(answer) > MAX_FRACTION_CHARS or len(gold) > MAX_FRACTION_CHARS:
        return None
    value, target = _fraction(first), _fraction(second)
    if value is None or target is None:
        return None
    if value == target:
        return None if target.denominator == 1 and (first["d1"] or first["d2"]) else True
    return None if abs(value - target) <= SLIGHT * max(1, abs(value), abs(target)) else False


def _integer(text: str) -> tuple[bool, str]:
    """(negative, digits without leading zeros): integers are compared as text, since `int` has a limit of digits."""
    digits = text.lstrip("+-").replace(",", "").lstrip("0")
    return text.startswith("-") and digits != "", digits


def _fraction(literal: re.Match[str]) -> Fraction | None:
    denominator = literal["d1"] or literal["d2"]
    if denominator is None:
        value = Fraction((literal["decimal"] or literal["grouped"]).replace(",", ""))
    elif int(denominator) == 0:
        return None
    else:
        value = Fraction(int(literal["n1"] or literal["n2"]), int(denominator))
    return -value if literal[0].startswith("-") else value
