"""Worked solutions for the supervised warm start."""

import re
import zlib
from collections.abc import Callable

import numpy as np

from score_centering.data import Problem
from score_centering.data.sums import UNKNOWN
from score_centering.settings import UserError
from score_centering.settings.model_blocks import Filler, WarmStart

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


def shuffled_sum(problem: Problem, filler: Filler, seed: int) -> str:
    r"""The running sum with the terms in random order and random filler words, an unknown left out.

    `Sum: 4 + 3 + x =` with answer 17 gives for instance `so 3 + 4 = 7. well ok \boxed{17}`. Equal for equal arguments.

    Raises:
        UserError: the text does not end in a sum of at least two integers.
    """
    expression = problem.prompt.rsplit(":", 1)[-1].strip().removesuffix("=").strip()
    terms = [term.strip() for term in expression.split("+")]
    known = [int(term) for term in terms if term.isdecimal()]
    if len(known) < 2 or any(not term.isdecimal() and term != UNKNOWN for term in terms):
        raise UserError(
            f"problem {problem.id}: the warm start's shuffled_sum needs a sum of integers and {UNKNOWN}, "
            f"got {expression!r}"
        )
    random = np.random.default_rng([seed, zlib.crc32(problem.prompt.encode())])

    def words(chance: float) -> str:
        drawn = []
        while random.random() < chance:
            drawn.append(filler.words[random.integers(len(filler.words))])
        return " ".join([*drawn, ""])

    total, *others = random.permutation(known).tolist()
    steps = []
    for term in others:
        steps.append(f"{words(filler.before_step)}{total} + {term} = {total + term}")
        total += term
    if len(known) == len(terms) and str(total) != problem.answer:
        raise UserError(f"problem {problem.id}: the running sum {total} is not the recorded answer {problem.answer!r}")
    return ", ".join(steps) + f". {words(filler.before_answer)}\\boxed{{{problem.answer}}}"


def worked_solution(options: WarmStart) -> Callable[[Problem], str]:
    """The worked solution of a problem that `options` describe."""
    match options.solution:
        case "running_sum":
            return running_sum
        case "shuffled_sum":
            return lambda problem: shuffled_sum(problem, options.filler or Filler(), options.seed)
        case "answer":
            return answer_only
    raise ValueError(f"model.warm_start.solution: {options.solution!r} is none of running_sum, shuffled_sum, answer")
