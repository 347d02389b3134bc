"""Synthetic sums, some of which nobody can answer: the reward never reaches 1, so advantages never vanish.

A problem is `Sum: 4 + 3 + 9 =`. In the unanswerable share of them one term is an unknown and the recorded answer a
number drawn at random (`Sum: 4 + 3 + x =`, answer 17): a policy can only guess it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from score_centering.data.problems import Problem, RawProblem
from score_centering.data.source import Source

NAME = "sums"
UNKNOWN = "x"


def open_sums(size: int, min_terms: int, max_terms: int, max_term: int, unanswerable_share: float, seed: int) -> Source:
    """`size` problems of `min_terms` to `max_terms` terms, each 0 to `max_term`; equal for equal arguments."""
    pin = {
        "kind": NAME,
        "size": size,
        "min_terms": min_terms,
        "max_terms": max_terms,
        "max_term": max_term,
        "unanswerable_share": unanswerable_share,
        "seed": seed,
    }
    rows = _rows(size, min_terms, max_terms, max_term, unanswerable_share, seed)
    return Source(name=NAME, rows=rows, pin=pin, files={})


def _rows(size: int, low: int, high: int, max_term: int, unanswerable: float, seed: int) -> Iterator[RawProblem]:
    random = np.random.default_rng([seed, 1])
    for _ in range(size):
        terms = random.integers(0, max_term + 1, random.integers(low, high + 1)).tolist()
        shown, answer = terms, sum(terms)
        if random.random() < unanswerable:
            shown, answer = [*terms, UNKNOWN], _guess(terms, high * max_term, seed)
        yield RawProblem(prompt=f"Sum: {' + '.join(map(str, shown))} =", answer=str(answer))


def _guess(terms: list[int], largest: int, seed: int) -> int:
    """A number from 0 to below the largest sum of known terms; the same each time the same problem is drawn."""
    return int(np.random.default_rng([seed, 2, *terms]).integers(0, largest))


def is_answerable(problem: Problem) -> bool:
    """False for a problem of this source with an unknown term."""
    return problem.source != NAME or UNKNOWN not in problem.prompt


def answerable_share(problems: Sequence[Problem]) -> float:
    """Share of at least one problem that can be answered: no policy's mean reward is higher, lucky guesses aside. 1
    where the source is another, which says nothing of it."""
    return sum(map(is_answerable, problems)) / len(problems)
