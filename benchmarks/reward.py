"""Answers judged a second: the scorer with one and with two workers, and math_verify alone in one process.

`…_per_s` follows the clock. `…_per_2_cpu_s` counts processor time of all processes, two seconds of it to one second of
two free cores: the rate that a busy machine does not change.

The answers are ordinary: three quarters are numbers, the rest fractions with radicals, tuples, intervals, expressions,
units and words; four responses a problem, half of them wrong. A second set holds no plain numbers at all.
"""

import logging
import os
import random
import time
from pathlib import Path

from _common import parse_args, report
from math_verify import parse, verify

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


def cpu_seconds() -> float:
    """Processor time so far of this process and its children."""
    ticks = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        ticks += sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def rate(scorer: Scorer, responses: list[str], golds: list[str]) -> tuple[float, float, list[float]]:
    """Answers a second by the clock, answers per two seconds of processor time, and the rewards."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    result = scorer.score(responses, golds, [False] * len(golds), [False] * len(golds))
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    if result.errors or result.timeouts:
        raise RuntimeError(f"{result.errors} errors and {result.timeouts} timeouts among ordinary answers")
    return len(golds) / seconds, 2 * len(golds) / cpu, result.rewards.tolist()


def math_verify_rate(responses: list[str], golds: list[str]) -> tuple[float, float]:
    """Answers a second by the clock and per two seconds of processor time, without the scorer."""
    start, cpu_start = time.perf_counter(), time.process_time()
    for response, gold in zip(responses, golds, strict=True):
        verify(parse(rf"\boxed{{{gold}}}"), parse(response))
    return len(golds) / (time.perf_counter() - start), 2 * len(golds) / (time.process_time() - cpu_start)


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
            for name, answers in (("ordinary", ordinary), ("symbolic", symbolic)):
                clock, cpu, scored = rate(scorer, *answers)
                figures[f"{name}_per_s_{workers}_workers"] = clock
                figures[f"{name}_per_2_cpu_s_{workers}_workers"] = cpu
                rewards.append(scored)
    math_verify_rate(*(side[:40] for side in warm_up))
    clock, cpu = math_verify_rate(*(side[: count // 10] for side in ordinary))
    figures["ordinary_per_s_math_verify_alone"] = clock
    figures["ordinary_per_2_cpu_s_math_verify_alone"] = cpu
    two_workers = figures["ordinary_per_2_cpu_s_2_workers"]
    goals = {
        "ordinary_per_2_cpu_s": (two_workers, 1000.0, "at least"),
        "speed_up_over_math_verify_alone": (two_workers / cpu, 2.0, "at least"),
        "rewards_differ_between_1_and_2_workers": (float(rewards[:2] != rewards[2:]), 0.0),
    }
    report("reward", "cpu", figures, goals)


if __name__ == "__main__":
    main()
