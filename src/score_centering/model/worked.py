"""Worked solutions for the supervised warm start."""

import re
from collections.abc import Callable

from score_centering.data import Problem
from score_centering.settings import UserError

_TERM = re.compile(r"([+-]?)\s*(\d+)")


def running_sum(problem: Problem) -> str:
    r"""The running sum of the problem's terms, one addition at a time, then the boxed answer.

    `… 4 + 3 - 9 =` gives `4 + 3 = 7, 7 - 9 = -2. \boxed{-2}`.

    Raises:
        UserError: the text does not end in a sum of integers, or that sum is not the answer.
    """
    expression = problem.prompt.rsplit(":", 1)[-1].strip().removesuffix("=").strip()
    terms = _TERM.findall(expression)
    if not terms or "".join(f"{sign}{digits}" for sign, digits in terms) != expression.replace(" ", ""):
        raise UserError(
            f"problem {problem.id}: the warm start's running_sum needs a sum of integers, got {expression!r}"
        )
    total = int(terms[0][0] + terms[0][1])
    steps = []
    for sign, digits in terms[1:]:
        new = total + int(sign + digits)
        steps.append(f"{total} {sign} {digits} = {new}")
        total = new
    if str(total) != problem.answer:
        raise UserError(f"problem {problem.id}: the running sum {total} is not the recorded answer {problem.answer!r}")
    return ", ".join(steps) + f". \\boxed{{{problem.answer}}}"


def answer_only(problem: Problem) -> str:
    """The boxed answer, nothing before it."""
    return f"\\boxed{{{problem.answer}}}"


SOLUTIONS: dict[str, Callable[[Problem], str]] = {"running_sum": running_sum, "answer": answer_only}
