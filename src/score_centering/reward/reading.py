"""What an answer is before anyone calculates: a word, a value, or a list, set, tuple, interval, union, ratio, matrix.

`read` takes a text in one spelling apart along its separators, brackets and equals signs, down to single values. So
every rule for values (units, bases, names, exactness) holds inside every structure.
"""

import functools
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal as OneOf

from score_centering.reward import units
from score_centering.reward.literals import Number, number

MAX_ITEMS = 64

GroupKind = OneOf["list", "set", "tuple", "union", "ratio", "matrix"]


@dataclass(frozen=True)
class Word:
    """An answer in words, or one letter of a choice: compared as a text."""

    text: str


@dataclass(frozen=True)
class Value:
    """One number or expression. `text` is without name, unit and scale; `number`: where it is a written-out result."""

    text: str
    unit: units.Unit = ()
    words: str = ""
    percent: bool = False
    base: tuple[str, str] | None = None
    number: Number | None = None

    @property
    def is_clock(self) -> bool:
        return _CLOCK.fullmatch(squeeze(self.text)) is not None

    @property
    def is_apart(self) -> bool:
        """Whether nothing but a space separates two digits."""
        return re.search("[0-9] +[0-9]", squeeze(self.text)) is not None


_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")


@dataclass(frozen=True)
class Group:
    """Items in an order that matters (tuple, ratio, matrix) or not. shape: brackets of a tuple, rows of a matrix."""

    kind: GroupKind
    items: tuple["Answer", ...]
    shape: str = ""


@dataclass(frozen=True)
class Answer:
    """`body` is what the answer amounts to: `x = 4 + 3 = 7` has the name x, the earlier side 4 + 3 and the body 7.

    text: the whole of it, for a comparison of equations.  about: what it is said to be nearly.
    """

    text: str
    body: Word | Value | Group
    names: tuple[str, ...] = ()
    earlier: tuple["Answer", ...] = ()
    about: "Answer | None" = None

    @property
    def is_equation(self) -> bool:
        """Whether it relates expressions with letters, instead of giving the value of a name."""
        return bool(self.earlier) and any(has_letters(side.text) for side in self.earlier)


# ------------------------------------------------------------------------------------------------------------- pieces
_SCAN = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_OPEN = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"}
_CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"}
_CONNECTIVE = re.compile(
    r",?\s*(?:\\(?:text|mathrm|mbox)\{\s*(?P<a>and|or)\s*\}|(?<![A-Za-z\\{])(?P<b>and|or)(?![A-Za-z]))\s*"
)
_CONDITION = re.compile(
    r",?\s*(?:\\q?quad)?\s*(?:\\(?:text|mathrm|mbox)\{\s*,?\s*for (?:all|every|any|each)(?: real)?(?: number)?s?\s*"
    r"(?P<inside>[a-zA-Z]?)\s*\}|(?<![A-Za-z\\])for (?:all|every|any)|\\forall(?![a-zA-Z]))"
    r"\s*\$?(?:[a-zA-Z](?:\s*\\in\s*\\mathbb\{R\})?)?\$?\s*$"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_SPACING = re.compile(r"\\[,:; ]|~|\\q?quad(?![a-zA-Z])")
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|varphi|omega|rho|sigma|tau|psi|xi|eta|Delta|Theta|Omega|ell"
_LETTER = re.compile(rf"(?<![A-Za-z\\])[A-Za-z]|\\(?:{GREEK})(?![a-zA-Z])|(?<=[A-Za-z0-9])[A-Za-z]")


def has_letters(text: str) -> bool:
    """Whether letters stand in it outside of commands, e and i being numbers."""
    bare = _COMMAND.sub(lambda match: "x" if re.fullmatch(rf"\\(?:{GREEK})", match[0]) else " ", text)
    return re.search("[A-DF-HJ-Za-df-hj-z]", bare) is not None


def squeeze(text: str) -> str:
    """`text` without spacing, but for a space between two digits that nothing else separates."""
    text = re.sub(r"(?<=[_^][0-9]) +", "", _SPACING.sub(" ", text))
    return re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text)


def pieces(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """(pieces between the separators that stand outside all brackets, those separators)."""
    parts, found, depth, start = [], [], 0, 0
    for match in _SCAN.finditer(text):
        token = match[0]
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : match.start()].strip())
            found.append(token)
            start = match.end()
    parts.append(text[start:].strip())
    return parts, found


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, content, closing bracket) where one pair encloses all of `text`."""
    opening = next((bracket for bracket in (r"\{", r"\langle", "(", "[", "{") if text.startswith(bracket)), None)
    if opening is None:
        return None
    depth = 0
    for match in _SCAN.finditer(text):
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if depth == 0:
            closing = match[0]
            if match.end() != len(text) or (opening in ("{", r"\{")) != (closing in ("}", r"\}")):
                return None
            return opening, text[len(opening) : match.start()].strip(), closing
    return None


# -------------------------------------------------------------------------------------------------------------- names
_INDEX = r"(?:_(?:[A-Za-z0-9]|\{[^{}]*\}|\\[a-z]+|\\text\{[^{}]*\})|'+|\^\{?\\prime\}?)*"
_WORDS = units.TEXT_COMMAND + r"\{[A-Za-z .-]+\}"
_OPERATOR = r"\\(?:max|min|deg|dim)|\\mathbb\{[EP]\}"
_ATOM = (
    rf"(?:[A-Za-z]{{1,4}}|\\(?:{GREEK})|{_WORDS}|{_OPERATOR}|m?\\(?:angle|triangle)\{{?[A-Z]{{1,4}}\}}?"
    rf"|\\(?:overline|vec|overrightarrow|hat)\{{[A-Za-z]{{1,4}}\}}|\|[A-Z]{{2}}\||\[[A-Z]{{3,6}}\]){_INDEX}"
)
_FUNCTION = rf"(?:[fghpquvFGHPQREVTSNACLMWDI]|\\(?:{GREEK})|{_WORDS}|{_OPERATOR}){_INDEX}(?:\^\{{-1\}})?"
_NAME = re.compile(
    rf"{_ATOM}(?:[+-]{_ATOM}){{0,5}}"
    rf"|{_FUNCTION}(?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\[\]]*\])"
    rf"|(?P<own>[A-Za-z])\((?!(?P=own)\))[A-Za-z]\)|\((?:{_ATOM},)+{_ATOM}\)"
    r"|\\frac\{d\^?2?[A-Za-z]?(?:\([a-z]\))?\}\{d[a-z](?:\^2)?\}(?:[A-Za-z]|\([a-z]\))?"
)
_VARIABLE = re.compile(rf"(?:[A-Za-z]|\\(?:{GREEK})){_INDEX}")


def is_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether `text` only names what is asked for: x, a_n, f(2), AB, \\angle A, P(X=3), m+n, (x,y)."""
    text = squeeze(text)
    return text not in ("e", "i") and _NAME.fullmatch(text) is not None


# -------------------------------------------------------------------------------------------------------------- words
_SHORT_WORDS = "an am as at be by do go he if in is it me my no of on or ox so to up us we"
_REALS = re.compile(r"(?:the set of )?all (?:the )?(?:real numbers|reals)", re.IGNORECASE)


def _is_plain_word(word: str) -> bool:
    """Whether letters without a \\text are a word and not a product: no, east; not ab, xyz."""
    if len(word) < 3:
        return word.casefold() in _SHORT_WORDS.split()
    letters = sorted(word)
    return [ord(letter) for letter in letters] != list(range(ord(letters[0]), ord(letters[0]) + len(letters)))


_DOTS = (r"\ldots", r"\dots", r"\cdots", "...")


def _word(text: str) -> str | None:
    """The words of an answer that holds nothing else, in lower case."""
    if squeeze(text) in _DOTS:
        return "\u2026"
    marked = units.TEXT.search(text) is not None
    flat = " ".join(re.sub(r"[{}]", " ", _SPACING.sub(" ", units.TEXT.sub(r" \1 ", text))).split()).rstrip(" .!")
    if not re.fullmatch(r"[A-Za-z][A-Za-z' .-]*" if marked else r"[A-Za-z][A-Za-z' ]*", flat):
        return None
    if len(flat) == 1 or not (marked or all(map(_is_plain_word, flat.split()))):
        return None
    return flat.casefold()


# --------------------------------------------------------------------------------------------------------------- read
_LISTS = frozenset({",", ";", r"\lor"})
_UNIONS = frozenset({r"\cup"})
_EQUALS = frozenset({"="})
_NEARLY = frozenset({r"\approx"})
_COLONS = frozenset({":"})
_LESS = {
    "<": ("(", False),
    r"\lt": ("(", False),
    r"\le": ("[", False),
    r"\leq": ("[", False),
    r"\leqslant": ("[", False),
}
_MORE = {">": ("(", True), r"\gt": ("(", True), r"\ge": ("[", True), r"\geq": ("[", True), r"\geqslant": ("[", True)}
_ORDERS = {**_LESS, **_MORE}
_RELATIONS = frozenset(_ORDERS)
_MEMBER = frozenset({r"\in"})
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}")
_BASE_WORDS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "ten": "10"}
_BASE = re.compile(
    r"\(?(?P<digits>[0-9][0-9A-Fa-f]*|[A-F]+)\)?_(?:\{\(?(?P<long>[0-9]+|\\text\{[a-z]+\})\)?\}|(?P<short>[0-9]))"
)


def read(text: str) -> Answer:
    """`text`, in one spelling, taken apart."""
    text = _undelimited(text)
    marked = units.TEXT.fullmatch(text)
    if marked and _word(text) is None:
        text = marked[1].strip()
    condition = _CONDITION.search(text)
    if condition and condition.start():
        text = text[: condition.start()].strip()
    word = _word(text)
    if word is not None and _REALS.fullmatch(word):
        return _read(r"\mathbb{R}")
    if word is not None:
        return Answer(text, Word(word))
    text = _CONNECTIVE.sub(lambda match: ", " if "and" in (match["a"], match["b"]) else r" \lor ", text)
    return _read(text)


def _undelimited(text: str) -> str:
    """`text` without math delimiters and spacing around it; a dollar sign that stands alone is a currency."""
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2]
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    return re.sub(r"^(?:\\q?quad(?![a-z])|\\[,:; ]|[ ~])+|(?:\\q?quad|\\[,:; ]|[ ~])+$", "", text)


def _read(text: str) -> Answer:
    separated = _separated(text)
    if len(separated) > 1:
        return Answer(text, _ordered_names(Group("list", tuple(map(_read, separated)))))
    nearly, _ = pieces(text, _NEARLY)
    if len(nearly) == 2 and all(nearly):
        return replace(_read(nearly[0]), about=_read(nearly[1]))
    sides, _ = pieces(text, _EQUALS)
    if len(sides) > 1 and all(sides):
        return _equation(text, sides)
    return Answer(text, *_body(text))


_THOUSANDS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_SPACED_COMMA = re.compile(r",(?: |~|\\[ ,:;])")


def _separated(text: str, bracketed: bool = False) -> list[str]:
    """The items of a list. A comma between digits groups them where the text is then one item, outside of brackets, or
    where the other commas have spaces."""
    grouped = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text) if "," in text else text
    if _SPACED_COMMA.search(text) or not (bracketed or pieces(grouped, _LISTS)[1]):
        text = grouped
    parts, found = pieces(text, _LISTS)
    if not found or len(parts) > MAX_ITEMS:
        return [text]
    if parts[-1] == "":
        parts.pop()
    return parts if all(parts) else [text]


def _equation(text: str, sides: list[str]) -> Answer:
    if is_name(sides[-1]) and not is_name(sides[0]):
        sides = sides[::-1]
    count = next((index for index, side in enumerate(sides) if not is_name(side)), len(sides) - 1)
    names = tuple(squeeze(side) for side in sides[:count])
    earlier = tuple(_read(side) for side in sides[count:-1])
    last = _read(sides[-1])
    return replace(last, text=text, names=names + last.names, earlier=earlier + last.earlier)


def _body(text: str) -> tuple[Word | Value | Group, tuple[str, ...]]:
    """(what a text without separators and equals signs is, the name that an inequality or a membership gives it)."""
    if number(text) is not None:
        return _value(text), ()
    word = _word(text)
    if word is not None:
        return Word(word), ()
    members, _ = pieces(text, _MEMBER)
    if len(members) == 2 and is_name(members[0]):
        inner = _read(members[1])
        return inner.body, (squeeze(members[0]),)
    interval = _interval(text)
    if interval is not None:
        return interval
    unions, found = pieces(text, _UNIONS)
    if found and all(unions):
        return Group("union", tuple(map(_read, unions))), ()
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
        if all(cell for row in cells for cell in row):
            items = tuple(_read(cell) for row in cells for cell in row)
            return Group("matrix", items, "x".join(str(len(row)) for row in cells)), ()
    if squeeze(text) in (r"\emptyset", r"\{\}"):
        return Group("set", ()), ()
    if squeeze(text) in (r"\mathbb{R}", r"\R", r"\mathbf{R}"):
        return Group("tuple", (_read(r"-\infty"), _read(r"\infty")), "()"), ()
    inside = enclosed(text)
    if inside is not None:
        return _bracketed(text, *inside), ()
    if re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return _both_signs(text), ()
    ratio, found = pieces(text, _COLONS)
    if found and all(ratio) and not re.match(r"[0-9]{1,2}:[0-9]{2}(?![0-9])", squeeze(text)):
        return Group("ratio", tuple(map(_read, ratio))), ()
    return _value(text), ()


def _bracketed(text: str, opening: str, content: str, closing: str) -> Word | Value | Group:
    items = _separated(content, bracketed=True)
    if opening == "{":
        return _read(content).body if content else _value(text)
    if opening == r"\{":
        builder = pieces(content, frozenset({":", "|", r"\mid"}))[0]
        if len(builder) == 2 and is_name(builder[0]):
            return _read(builder[1]).body
        return _read(items[0]).body if len(items) == 1 else Group("set", tuple(map(_read, items)))
    if len(items) > 1:
        return Group("tuple", tuple(map(_read, items)), opening + closing)
    if opening + closing == "()" or number(content) is not None:
        inner = _read(content)
        return _value(text) if inner.names or inner.earlier else inner.body
    return _value(text)


def _interval(text: str) -> tuple[Group, tuple[str, ...]] | None:
    """x > 3, 3 < x and -2 < x ≤ 3 as the intervals that they are, and the name."""
    sides, signs = pieces(text, _RELATIONS)
    if not signs or len(signs) > 2 or not all(sides):
        return None
    if _ORDERS[signs[0]][1] != _ORDERS[signs[-1]][1]:
        return None
    brackets = [_ORDERS[sign][0] for sign in signs]
    if _ORDERS[signs[0]][1]:
        sides, brackets = sides[::-1], brackets[::-1]
    names = [_VARIABLE.fullmatch(squeeze(side)) is not None for side in sides]
    if len(sides) == 2 and names == [True, False]:  # x < a
        low, high, left, right, name = r"-\infty", sides[1], "(", brackets[0], sides[0]
    elif len(sides) == 2 and names == [False, True]:  # a < x
        low, high, left, right, name = sides[0], r"\infty", brackets[0], "(", sides[1]
    elif len(sides) == 3 and names == [False, True, False]:
        low, high, left, right, name = sides[0], sides[2], brackets[0], brackets[1], sides[1]
    else:
        return None
    group = Group("tuple", (_read(low), _read(high)), left + {"(": ")", "[": "]"}[right])
    return group, (squeeze(name),)


def _both_signs(text: str) -> Value | Group:
    plus = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    minus = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return Group("list", tuple(_read(re.sub(r"(^|[({\[=]) *\+ *", r"\1", one)) for one in (plus, minus)))


def _ordered_names(group: Group) -> Group:
    """`group`, or a union where it is a list of inequalities that `or` joins."""
    if all(isinstance(item.body, Group) and item.body.kind == "tuple" and item.names for item in group.items) and (
        len({item.names for item in group.items}) == 1 and all(_RELATION.search(item.text) for item in group.items)
    ):
        return Group("union", tuple(replace(item, names=()) for item in group.items))
    return group


_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|leq|geq|leqslant|geqslant)(?![a-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))")


def _radians(match: re.Match[str]) -> str:
    part = Fraction(match[1]) / 180
    return rf"{{\frac{{{part.numerator}\pi}}{{{part.denominator}}}}}".replace("{1\\pi}", r"{\pi}")


@functools.lru_cache(maxsize=4096)
def _value(text: str) -> Value:
    tail = units.split(text)
    content = _DEGREES.sub(_radians, tail.value)
    found = number(content)
    if found is not None and tail.scale != 1 and found.value is not None:
        found = Number("decimal" if found.form != "integer" else "integer", found.value * tail.scale)
        found = number(str(found.value)) or found
    elif tail.scale != 1:
        return Value(text, words=tail.words or str(tail.scale))
    based = _BASE.fullmatch(squeeze(content))
    base = None
    if based:
        named = based["long"] or based["short"]
        name = units.TEXT.sub(r"\1", named)
        content = based["digits"].casefold().lstrip("0") or "0"
        base, found = (content, _BASE_WORDS.get(name, name)), number(content)
    return Value(content, tail.unit, tail.words, tail.percent, base, found)
