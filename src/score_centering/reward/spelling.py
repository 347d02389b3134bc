"""One spelling of a text for everything that is written in several ways and means the same. Knows no values."""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

Replacement = str | Callable[[re.Match[str]], str]

CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d\u00ad", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u3000\t\n\r\f\v", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "±": r"\pm ", "∓": r"\mp ", "⁄": "/", "∕": "/", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "∠": r"\angle ", "∀": r"\forall ", "′": "'", "’": "'",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


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


def _thousands(match: re.Match[str]) -> str:
    return match[1] + re.sub("[^0-9]", "", match[2])


# In this order, after the characters: (what is written, how it is spelled).
SPELLINGS: tuple[tuple[re.Pattern[str], Replacement], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![0-9A-Za-z.\\}])([0-9]++(?:\.[0-9]++)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![0-9A-Za-z])", _scientific),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle)(?![a-zA-Z]) ?", ""),
        (r"\\(?:bf|rm|it|(?:text)?color\{[a-zA-Z]*\})(?![a-zA-Z]) ?", ""),
        (r"\\!", ""),
        (r"\\(?:boldsymbol|bm|underline|pmb|mathbf)\{([^{}]*)\}", r"\1"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac ?([0-9]) ?(?=\{)", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
        (r"√ ?(?:\(([^()]*)\)|([0-9]+|[a-zA-Z]))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}"),
        (r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\overline\{([0-9]{1,20})\}(?![0-9])", _repeating),
        (r"(?<![0-9.,/^_])([0-9]++) ([0-9]++)/([0-9]++)(?![./])", r"\1\\frac{\2}{\3}"),
        (r"(?<![0-9.,])([0-9]{1,3})((?:(?:\\[,:; ]|\{,\}|~| )[0-9]{3})+)(?![0-9])", _thousands),
    )
)  # fmt: skip
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")


def one_spelling(text: str) -> str:
    """`text` with one spelling for digits, signs, spaces, sizes and styles, fractions, roots, scientific notation and
    thousands separators."""
    if not text.isascii():
        text = "".join(_spell(character) for character in _SUPERSCRIPT_RUN.sub(_superscript, text))
    text = " ".join(text.split())
    text = text.removesuffix(".").strip() if not text.endswith("..") else text
    if text.isdecimal():
        return text
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _spell(character: str) -> str:
    spelling = CHARACTERS.get(character)
    if spelling is not None:
        return spelling
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    return chr(ord(character) - 0xFEE0) if "\uff01" <= character <= "\uff5e" else character
