"""A recogniser of the commonest LaTeX answers, a thousand times faster than parsing them.

It spares data preparation the parser on hundreds of thousands of gold answers. It says yes to a small part of what
math_verify reads, and only to that; a test generates answers it accepts and has each of them judged.
"""

import re

MAX_CHARS = 80
MAX_DEPTH = 4

_SPACING = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|(?<![0-9]) | (?![0-9])")
_TOKEN = re.compile(
    r"""(?P<command>\\(?:frac|sqrt|infty)(?![a-zA-Z]) | \\[{}] | [-+^={}()\[\],])
      | (?P<factor>\\(?:pi|theta|alpha|beta)(?![a-zA-Z])
                  | [0-9]*[1-9][0-9]*(?:\.[0-9]+)?(?![0-9.])
                  | [a-zA-Z](?![0-9]))""",
    re.VERBOSE,
)
_SUM = "-?[ap]{1,8}(?:[+-][ap]{1,8}){0,8}"
_GROUP = re.compile(rf"F\{{{_SUM}\}}\{{{_SUM}\}}|S\{{{_SUM}\}}|\({_SUM}\)")
_POWER = re.compile(rf"a\^(?:a|\{{{_SUM}\}})")
_BOUND = f"(?:{_SUM}|[+-]?I)"
_ANSWER = re.compile(rf"(?:a=)?{_SUM}|[(\[]{_BOUND},{_BOUND}[)\]]|{_SUM}(?:,{_SUM}){{1,5}}|<{_SUM}(?:,{_SUM}){{1,5}}>")
_SHORT = {r"\frac": "F", r"\sqrt": "S", r"\infty": "I", r"\{": "<", r"\}": ">"}


def is_plain_math(text: str) -> bool:
    """Whether `text` is a sum of products, or an equation, pair, interval, list or set of such; False if unsure."""
    if len(text) > MAX_CHARS:
        return False
    shape = _shape(_SPACING.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    if shape is None:
        return False
    for _ in range(MAX_DEPTH):
        reduced = _POWER.sub("p", _GROUP.sub("a", shape))
        if reduced == shape:
            break
        shape = reduced
    return _ANSWER.fullmatch(shape) is not None


def _shape(text: str) -> str | None:
    """One character a token: `a` for a number other than 0 or a letter; None where a token is none of ours."""
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append("a" if match["factor"] else _SHORT.get(match[0], match[0]))
        position = match.end()
    return "".join(tokens)
