"""Rows of a dataset, before and after preparation."""

import unicodedata
from typing import NamedTuple

MALFORMED_PROMPT = "malformed_prompt"  # neither text nor one user message of text


class RawProblem(NamedTuple):
    """One row as its source holds it: `answer` is the answer's text, or None where `fault` says why there is none."""

    prompt: str | None
    answer: str | None
    fault: str | None = None
    id: str | None = None
    solve_rate: float | None = None


class Problem(NamedTuple):
    """One row of `train.parquet` or `test.parquet`."""

    prompt: str
    answer: str
    id: str
    source: str


def user_message(problem: str, instruction: str) -> dict[str, str]:
    """The one message of a conversation that asks for a solution: the problem, a line break, the instruction."""
    return {"role": "user", "content": f"{problem}\n{instruction}"}


def normalise_prompt(prompt: str) -> str:
    """The form in which two prompts are compared: NFKC, case folded, each run of white space one space."""
    if prompt.isascii():
        return " ".join(prompt.lower().split())
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
