"""The answer of a source row, or the reason why it has none. Every reason is a key of the manifest's `dropped`."""

import json
from typing import NoReturn

MISSING_VERIFICATION = "missing_verification_info"
MALFORMED_VERIFICATION = "malformed_verification_info"
MISSING = "missing_answer"
NULL = "null_answer"
EMPTY = "empty_answer"
MALFORMED = "malformed_answer"
UNMARKED = "unmarked_answer"  # a solution that marks no answer in the way it was said to


class _Number(str):
    """A JSON number as it is written: `0.10` stays `0.10`, `1e20` never becomes `1e+20`."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


DECODER = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_refuse_constant)


def answer_of_verification_info(text: object) -> tuple[str | None, str | None]:
    """(answer, None) of a `verification_info` JSON string, or (None, reason). Only `ground_truth` is read."""
    if text is None or text == "":
        return None, MISSING_VERIFICATION
    if not isinstance(text, str):
        return None, MALFORMED_VERIFICATION
    try:
        info = DECODER.decode(text)  # keeps numbers as they are written
    except (ValueError, RecursionError):
        return None, MALFORMED_VERIFICATION
    if not isinstance(info, dict):
        return None, MALFORMED_VERIFICATION
    if "ground_truth" not in info:
        return None, MISSING
    return answer_of_value(info["ground_truth"])


def answer_of_value(value: object) -> tuple[str | None, str | None]:
    """(answer, None) of a string, number or flat list of both, or (None, reason).

    A list is the collection of all its elements, written with commas: an answer must give every one of them.
    """
    if value is None:
        return None, NULL
    if isinstance(value, list):
        return _answer_of_list(value)
    return _answer_of_scalar(value)


def after_hashes(solution: str) -> str | None:
    """What follows the last `####` of a worked solution, GSM8K's form, up to the end of its line; None: no such mark.

    >>> after_hashes("She sells 16 - 3 = 13.\\n#### 13")
    '13'
    """
    _, mark, rest = solution.rpartition("####")
    return rest.partition("\n")[0].strip() or None if mark else None


def _answer_of_scalar(value: object) -> tuple[str | None, str | None]:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None, MALFORMED
    if isinstance(value, float) and value - value != 0:  # infinite or NaN
        return None, MALFORMED
    text = str(value).strip()
    return (text, None) if text else (None, EMPTY)


def _answer_of_list(values: list[object]) -> tuple[str | None, str | None]:
    if not values:
        return None, EMPTY
    answers = [_answer_of_scalar(value)[0] for value in values]
    if None in answers:
        return None, EMPTY if len(values) == 1 and values[0] == "" else MALFORMED
    return ", ".join(dict.fromkeys(answers)), None
