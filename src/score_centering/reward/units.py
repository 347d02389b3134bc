"""Units and what else may follow a number: the short list. A word that is not in it is no unit.

The rule: a number with its unit equals the number alone; two units must be the same, in any of their spellings. Units
are not converted: 100 cm is not 1 m. Words that scale (million, dozen) are part of the number.
"""

import re
from collections import Counter
from typing import NamedTuple

Unit = tuple[tuple[str, int], ...]  # (name, exponent) of each factor, sorted


class Row(NamedTuple):
    """spellings: in lower case, without a plural s. plain: those that are units outside \\text too."""

    name: str
    spellings: str
    plain: str = ""


_NOUNS = """
    apple orange ball book box boy girl car card chair child coin cookie cow dog cat digit edge egg face fish flower
    friend game hen horse integer item letter line man marble meal member number orbit page part pen pencil person
    piece pizza player point possibility problem question rabbit row seat sheep side slice solution stamp step
    sticker student subset team term test ticket tile time toy tree triangle value vertex way window woman word
    worker
"""
UNITS = (
    Row("m", "m meter metre", "m meter metre"),
    Row("cm", "cm centimeter centimetre", "cm centimeter centimetre"),
    Row("mm", "mm millimeter millimetre", "mm millimeter millimetre"),
    Row("dm", "dm decimeter decimetre", "dm decimeter"),
    Row("km", "km kilometer kilometre", "km kilometer kilometre"),
    Row("nm", "nm nanometer nanometre"),
    Row("inch", "in inch inche", "inch inche"),
    Row("foot", "ft foot feet", "ft foot feet"),
    Row("yard", "yd yard", "yd yard"),
    Row("mile", "mi mile", "mi mile"),
    Row("hectare", "ha hectare", "ha hectare"),
    Row("acre", "acre", "acre"),
    Row("g", "g gm gram gramme", "g gram"),
    Row("kg", "kg kilogram kilo", "kg kilogram"),
    Row("mg", "mg milligram", "mg milligram"),
    Row("tonne", "t ton tonne", "ton tonne"),
    Row("pound", "lb pound", "lb pound"),
    Row("ounce", "oz ounce", "oz ounce"),
    Row("second", "s sec second", "s sec second"),
    Row("millisecond", "ms millisecond", "millisecond"),
    Row("minute", "min minute", "min minute"),
    Row("hour", "h hr hour", "h hr hour"),
    Row("day", "d day", "day"),
    Row("week", "wk week", "week"),
    Row("month", "month", "month"),
    Row("year", "yr year", "yr year"),
    Row("l", "l liter litre", "L liter litre"),
    Row("ml", "ml milliliter millilitre", "ml mL"),
    Row("gallon", "gal gallon", "gallon"),
    Row("cup", "cup", "cup"),
    Row("n", "n newton", "N newton"),
    Row("j", "j joule", "J joule"),
    Row("kj", "kj kilojoule", "kJ"),
    Row("w", "w watt", "W watt"),
    Row("kw", "kw kilowatt", "kW"),
    Row("v", "v volt", "V volt"),
    Row("ampere", "a amp ampere", "A ampere"),
    Row("ohm", "ohm", "ohm"),
    Row("hz", "hz hertz", "Hz hertz"),
    Row("pa", "pa pascal", "Pa"),
    Row("mol", "mol mole", "mol mole"),
    Row("kelvin", "k kelvin", "K kelvin"),
    Row("celsius", "celsius", "celsius"),
    Row("fahrenheit", "fahrenheit", "fahrenheit"),
    Row("degree", "degree deg", "degree"),
    Row("radian", "radian rad", "radian"),
    Row("dollar", "dollar usd buck", "dollar usd"),
    Row("cent", "cent ¢", "cent"),
    Row("euro", "euro eur", "euro"),
    Row("rupee", "rupee rs inr", "rupee"),
    Row("yuan", "yuan rmb", "yuan"),
    Row("yen", "yen", "yen"),
    Row("am", "a.m. a.m am"),
    Row("pm", "p.m. p.m pm"),
    Row("unit", "unit", "unit"),
    *(Row(noun, noun, noun) for noun in _NOUNS.split()),
)  # fmt: skip
SYNONYMS = {
    "people": "person", "persons": "person", "children": "child", "men": "man", "women": "woman", "inches": "inch",
    "boxes": "box", "vertices": "vertex", "possibilities": "possibility", "mph": "mile/hour", "kmh": "km/hour",
    "kph": "km/hour", "kmph": "km/hour", "cc": "cm^3", "sqft": "foot^2",
}  # fmt: skip
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound sterling", r"\pounds": "pound sterling"}
ORDINALS = {"st", "nd", "rd", "th"}
_PREFIX_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIX_POWERS = {"squared": 2, "cubed": 3}

_NAMES = {spelling: row.name for row in UNITS for spelling in row.spellings.split()}
_PLAIN = {spelling for row in UNITS for spelling in row.plain.split()} | set(SYNONYMS) | set(SCALES)
_PLAIN |= {"percent", *_PREFIX_POWERS, *_SUFFIX_POWERS, "per"}
_WORD = re.compile(r"[A-Za-z¢]+(?:\.[A-Za-z]+)*\.?")
_TOKEN = re.compile(
    rf"({_WORD.pattern})|\^(?:\{{(-?[0-9])\}}|(-?[0-9]))|(/|\*|-(?=[A-Za-z])|\\cdot|\\times)|[ ~,;:()]|\\[,:; ]"
)
TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|sf|normal|up)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|rm)"
TEXT = re.compile(TEXT_COMMAND + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_START = re.compile(
    rf"(?P<text>{TEXT.pattern})|(?<![A-Za-z\\_^])(?P<word>[A-Za-z]{{2,}})(?![A-Za-z])"
    r"|(?<=[ ~])(?P<letter>[mgshLNJWVAK])(?![A-Za-z_({])"
)
_DEGREE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])")


# Words of a gold answer that make it another answer than its number.
_NO_NOUNS = """
    or and more less fewer than at least most about around approximately plus minus times over if when for not of
    mod remainder factorial squared cubed half halves third thirds quarter quarters tenth tenths not no but also
    maybe only except to from between up down above below before after ago percent out by until
"""
MAX_NOUN_WORDS = 3


def is_noun(words: str) -> bool:
    """Whether a gold answer's words, which are no unit, may be left out: they only say what is counted."""
    listed = words.split()
    return len(listed) <= MAX_NOUN_WORDS and all(word.isalpha() and word not in _NO_NOUNS.split() for word in listed)


class Tail(NamedTuple):
    """What follows a number. words: what is no unit, as written; "" where all is one."""

    value: str
    unit: Unit = ()
    words: str = ""
    scale: int = 1
    percent: bool = False


def split(text: str) -> Tail:
    """`text`, in one spelling, as a value and what follows or precedes it."""
    unit, rest = _currency(text)
    percent = re.search(r"\\?%\s*$", rest)
    if percent:
        return Tail(rest[: percent.start()].strip(), unit, percent=True)
    for match in _START.finditer(rest):
        if match["word"] and not _is_plain(match["word"], rest[: match.start()]):
            continue
        if match["letter"] and re.search(r"(?<!\\)\b[A-Za-z]|[^0-9})]$", _strip_space(rest[: match.start()])):
            continue
        if _depth(rest[: match.start()]) or rest[: match.start()].rstrip().endswith(("_", "^", "_{", "^{")):
            continue
        value = _strip_space(rest[: match.start()])
        if not value:
            continue
        return _tail(value, rest[match.start() :], unit)
    degree = _DEGREE.search(rest)
    if degree and _strip_space(rest[degree.end() :]) in ("", "C", "F", r"\cdot"):
        scale = {"C": "celsius", "F": "fahrenheit"}.get(_strip_space(rest[degree.end() :]), "degree")
        if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc|arc)|(?<=.)[-+*]|\\cdot", rest[: degree.start()]):
            return Tail(_strip_space(rest[: degree.start()]), ((scale, 1),))
    return Tail(rest, unit)


def _strip_space(text: str) -> str:
    return re.sub(r"^(?:\\[,:; ]|[ ~])+|(?:\\[,:; ]|[ ~])+$", "", text)


def _depth(text: str) -> int:
    return sum(text.count(c) for c in "({[") - sum(text.count(c) for c in ")}]")


def _is_plain(word: str, before: str) -> bool:
    if word.casefold() in ("am", "pm"):
        return ":" in before
    return word in _PLAIN or word.removesuffix("s") in _PLAIN or (word in ORDINALS and before[-1:].isdigit())


def _currency(text: str) -> tuple[Unit, str]:
    match = re.match(r"(-?) ?(\\\$|\$|€|£|\\pounds(?![a-z])|(?:\\text\{ ?)?Rs\.? ?\}?(?![a-z])) ?(?=[-0-9.\\])", text)
    if match is None:
        return (), text
    return ((CURRENCIES.get(match[2], "rupee"), 1),), match[1] + text[match.end() :].strip()


def _tail(value: str, text: str, unit: Unit) -> Tail:
    """The words after `value`: a percent sign, a scale, a unit, or words that are none of them."""
    degree = _DEGREE.search(value)
    flat = TEXT.sub(r" \1 ", text).strip(" .")
    if degree and not value[degree.end() :].strip():
        temperature = {"c": "celsius", "f": "fahrenheit"}.get(flat.strip().casefold())
        return Tail(value[: degree.start()], ((temperature, 1),)) if temperature else Tail(value, (), flat)
    if flat.casefold() in ("percent", "percentage", "pct", "%", r"\%"):
        return Tail(value, unit, percent=True)
    first, _, rest = flat.partition(" ")
    scale = SCALES.get(first.casefold().removesuffix("s"), 1)
    remaining = (rest if scale != 1 else flat).strip()
    if remaining.casefold() in ORDINALS and re.search("[0-9]$", value):
        return Tail(value, (("ordinal", 1),), scale=scale)
    found = () if not remaining else parse(remaining)
    if found is None or (found and unit and found != unit):
        return Tail(value, unit, " ".join(flat.casefold().split()), scale)
    return Tail(value, found or unit, scale=scale)


def parse(text: str) -> Unit | None:
    """The unit that `text` names, or None: products and quotients of names of the list, with exponents."""
    text = re.sub(r"\b[Dd]egrees? (?=[CcFf])", "", text)
    factors: Counter[str] = Counter()
    sign, power, last = 1, 1, None
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        word, operator = match[1], match[4]
        exponent = match[2] or match[3]
        if exponent is not None:
            if last is None:
                return None
            factors[last] += (int(exponent) - 1) * (1 if factors[last] > 0 else -1)
        elif operator == "/":
            sign = -1
        elif word is not None:
            lowered = word.casefold()
            if lowered == "per":
                sign = -1
            elif lowered in _PREFIX_POWERS and (text[position:].strip() or last is None):
                power = _PREFIX_POWERS[lowered]
            elif lowered in _SUFFIX_POWERS:
                if last is None:
                    return None
                factors[last] *= _SUFFIX_POWERS[lowered]
            else:
                found = _named(word)
                if found is None:
                    return None
                for last, count in found:
                    factors[last] += sign * power * count
                power = 1
    return tuple(sorted((name, count) for name, count in factors.items() if count)) or None


def _named(word: str) -> Unit | None:
    lowered = word.casefold()
    lowered = SYNONYMS.get(lowered, SYNONYMS.get(lowered.removesuffix("s"), lowered))
    if "/" in lowered:
        above, below = lowered.split("/")
        return ((above, 1), (below, -1))
    if "^" in lowered:
        name, exponent = lowered.split("^")
        return ((name, int(exponent)),)
    name = _NAMES.get(lowered) or _NAMES.get(lowered.removesuffix("s")) or _NAMES.get(lowered.rstrip("."))
    return None if name is None else ((name, 1),)
