"""Answers judged a second: the scorer with one and with two workers, and math_verify alone in one process.

The answers are ordinary: three quarters are numbers, the rest fractions with radicals, tuples, intervals, expressions,
units and words; four responses a problem, half of them wrong. A second set holds no plain numbers at all.
"""

import logging
import random
import time

from _common import parse_args, report

from score_centering.reward import Scorer

logging.getLogger("math_verify").setLevel(logging.ERROR)

SHARES = {
    "integer": 60,
    "decimal": 6,
    "fraction": 9,
    "unit": 5,
    "radical": 6,
    "tuple": 4,
    "interval": 2,
    "expression": 6,
}
RESPONSES = 4


def answer(kind: str, rng: random.Random) -> str:
    first, second, third = (rng.randint(2, 99) for _ in range(3))
    return {
        "integer": str(rng.randint(-999, 99_999)),
        "decimal": f"{first}.{second}",
        "fraction": rf"\frac{{{first}}}{{{second}}}",
        "unit": rf"{first}\text{{ cm}}",
        "radical": rf"{first}\sqrt{{{second}}}",
        "tuple": f"({first},{second})",
        "interval": rf"[{first},\infty)",
        "expression": f"{first}x^2+{second}x-{third}",
        "word": rng.choice([r"\text{Monday}", r"\text{even}", r"\text{no solution}"]),
    }[kind]


def problems(count: int, shares: dict[str, int], seed: int) -> tuple[list[str], list[str]]:
    """(responses, gold answers), `count` of each."""
    rng = random.Random(seed)
    responses, golds = [], []
    while len(golds) < count:
        [kind] = rng.choices(list(shares), list(shares.values()))
        gold = answer(kind, rng)
        for _ in range(RESPONSES):
            given = gold if rng.random() < 0.5 else answer(kind, rng)
            responses.append(rf"We add both sides and find that it is \boxed{{{given}}}.")
            golds.append(gold)
    return responses[:count], golds[:count]


def rate(scorer: Scorer, responses: list[str], golds: list[str]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    result = scorer.score(responses, golds, [False] * len(golds))
    seconds = time.perf_counter() - start
    if result.errors or result.timeouts:
        raise RuntimeError(f"{result.errors} errors and {result.timeouts} timeouts among ordinary answers")
    return len(golds) / seconds, result.rewards.tolist()


def math_verify_rate(responses: list[str], golds: list[str]) -> float:
    from math_verify import parse, verify

    start = time.perf_counter()
    for response, gold in zip(responses, golds, strict=True):
        verify(parse(rf"\boxed{{{gold}}}"), parse(response))
    return len(golds) / (time.perf_counter() - start)


def main() -> None:
    arguments = parse_args(__doc__)
    count = 1000 if arguments.quick else 4000
    ordinary = problems(count, {**SHARES, "word": 2}, seed=1)
    symbolic = problems(count // 10, {"radical": 1, "tuple": 1, "interval": 1, "expression": 1}, seed=2)
    warm_up = problems(40, {**SHARES, "word": 2}, seed=3)
    figures, rewards = {}, []
    for workers in (1, 2):
        with Scorer(workers=workers) as scorer:
            start = time.perf_counter()
            rate(scorer, *problems(8, {"radical": 1, "expression": 1}, seed=4))
            figures[f"first_answers_s_{workers}_workers"] = time.perf_counter() - start
            rate(scorer, *warm_up)
            figures[f"ordinary_per_s_{workers}_workers"], scored = rate(scorer, *ordinary)
            figures[f"symbolic_per_s_{workers}_workers"], _ = rate(scorer, *symbolic)
            rewards.append(scored)
    sample = [side[: count // 10] for side in ordinary]
    math_verify_rate(*(side[:40] for side in warm_up))
    figures["ordinary_per_s_math_verify_alone"] = math_verify_rate(*sample)
    rates = [figures[f"ordinary_per_s_{which}"] for which in ("2_workers", "math_verify_alone")]
    goals = {
        "ordinary_per_s_2_workers": (rates[0], 500.0, "at least"),
        "speed_up_over_math_verify_alone": (rates[0] / rates[1], 2.0, "at least"),
        "rewards_that_differ_between_1_and_2_workers": (sum(a != b for a, b in zip(*rewards, strict=True)), 0.0),
    }
    report("reward", "cpu", figures, goals)


if __name__ == "__main__":
    main()
