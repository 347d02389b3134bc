"""Where the answer stands in a response: the last box after the thinking. Knows nothing of mathematics."""

import re

MAX_ANSWER_CHARS = 10_000  # a longer boxed expression is no answer; the longest gold answers have a few hundred
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_answer(response: str, thinking: bool = False) -> str | None:
    """What the last `\\boxed{…}` after the thinking holds, or None.

    Only that one counts: a response whose last box is never closed, is empty, or stands inside the thinking has no
    answer, whatever boxes stand before it. Boxes inside the box are opened.

    thinking: whether the prompt left thinking open, so that the response begins inside it.
    """
    start = response.rfind(THINK_CLOSE)
    if start >= 0:
        start, thinking = start + len(THINK_CLOSE), False
    if thinking or response.find(THINK_OPEN, max(start, 0)) >= 0:
        return None
    content = None
    position = max(start, 0)
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
