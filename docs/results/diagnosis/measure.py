"""How often is a verdict right? The labelled runs, the rules for their labels, and the confusion matrix.

    python docs/results/diagnosis/measure.py --half development     # while rules are made
    python docs/results/diagnosis/measure.py --half held-out --output docs/results/diagnosis

A label is the set of verdicts that are right for a run, by how it was made and how it ended, never by its log's signs.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from kinds import KINDS
from split import held_out

from score_centering.diagnosis import VERDICTS, Log, Series, diagnose
from score_centering.diagnosis.readers import make_log

HERE = Path(__file__).parent
PREFIXES = {"first third": 1 / 3, "two thirds": 2 / 3, "whole": 1.0}
LOST = 0.5  # last tenth below this share of the best tenth


@dataclass(frozen=True)
class Run:
    """One labelled run."""

    name: str
    source: str
    log: Log
    corrections: str
    sampler: str  # "exact", "coarse" or "stale"
    control: str | None  # the run of the same settings with an exact sampler
    planted: str | None = None  # the verdict of a planted fault

    @property
    def lost(self) -> bool:
        first, best, last = levels(self.log)
        return bool(last < LOST * max(first, best))


def levels(log: Log) -> tuple[float, float, float]:
    """Mean reward of the first rows (3 at most), of the best tenth and of the last tenth (2 rows at least)."""
    values = log.series["reward"].values
    size = max(2, len(values) // 10)
    means = [values[i : i + size].mean() for i in range(0, max(1, len(values) - size + 1))]
    return values[: min(3, size)].mean(), max(means), values[-size:].mean()


def right(run: Run, runs: dict[str, Run]) -> set[str]:
    """The verdicts that are right. Declared before any held-out run was read.

    Where the control of the same settings is lost too, an uncorrected run's loss may be called by either cause. A
    sampler whose reward is below half of the clean one at first or at last may be called broken.
    """
    if run.planted is not None and run.planted != "by fate":
        return {"tail", "sampler_broken"} if run.planted in ("tail", "sampler_broken") else {run.planted}
    first, _, last = levels(run.log)
    control = runs.get(run.control) if run.control else None
    clean = run.log.get("clean_reward")
    poor = poor_at_first = False
    if clean is not None and run.sampler == "coarse":
        poor = clean.values[-1] > max(2 * last, 0.15)
        poor_at_first = clean.values[0] > 2 * first
    if poor and poor_at_first:
        return {"sampler_broken"}
    also = {"sampler_broken"} if poor or poor_at_first else set()
    if run.lost:
        if run.sampler == "exact" or (run.corrections in ("centering", "both") and run.sampler == "coarse"):
            return {"instability"} | also
        cause = "off_policy" if run.sampler == "stale" else "drift"
        return {cause} | also | ({"instability"} if control is None or control.lost else set())
    if run.sampler == "stale":
        return {"harmless", "off_policy"}
    damaged = control is not None and not control.lost and last < 0.9 * levels(control.log)[2]
    return {"harmless"} | also | ({"drift"} if damaged and run.sampler == "coarse" else set())


def labelled() -> dict[str, Run]:
    found = [*exploration(), *planted(), *scan(), *collapse()]
    runs = {run.name: run for run in found}
    assert len(runs) == len(found), "two runs share a name"
    return runs


def _logs(file: Path) -> Iterator[tuple[str, dict[str, dict[int, float]]]]:
    table = pq.read_table(file).to_pydict()
    columns = [name for name in table if name not in ("run", "step")]
    by_run: dict[str, dict[str, dict[int, float]]] = {}
    for row, run in enumerate(table["run"]):
        for name in columns:
            value = table[name][row]
            if isinstance(value, int | float):
                by_run.setdefault(run, {}).setdefault(name, {})[int(table["step"][row])] = float(value)
    yield from by_run.items()


def exploration() -> Iterator[Run]:
    """The runs that this project's map began with: arm_sampler_optimiser names, 19 tokens a response."""
    for name, columns in _logs(HERE / "exploration.parquet"):
        arm, sampler, *rest = name.removeprefix("s_").removeprefix("t_").removeprefix("u_").removeprefix(
            "v_").removeprefix("w_").removeprefix("x_").split("_")  # fmt: skip
        series = make_log(name, columns).series
        steps = series["reward"].steps
        series["length"] = Series(steps, np.full(len(steps), 19.0))
        kind = "exact" if arm == "control" else "stale" if sampler == "st" else "coarse"
        prefix = name[:2] if name[1] == "_" else ""
        rate = sampler if arm == "control" else rest[0]
        corrections = {"sc": "centering", "tis": "weights", "sctis": "both"}.get(arm, "none")
        control = None if kind == "exact" else f"{prefix}control_{rate}"
        yield Run(name, "exploration", Log(name, series), corrections, kind, control)


def planted() -> Iterator[Run]:
    for name, columns in _logs(HERE / "planted.parquet"):
        kind = name.rpartition("-s")[0]
        settings = KINDS[kind][1]
        sampler = "stale" if "sync_every" in settings else "coarse" if {"int8", "noise"} & set(settings) else "exact"
        verdict = KINDS[kind][0]
        fate = verdict in ("harmless", "off_policy", "instability")
        corrections = "centering" if kind == "healthy-sc" else "none"
        yield Run(name, "planted", make_log(name, columns), corrections, sampler, None, "by fate" if fate else verdict)


def scan() -> Iterator[Run]:
    """docs/results/scan: settings in the run's name."""
    for name, columns in _logs(HERE.parent / "scan" / "curves.parquet"):
        arm = next((arm for arm in ("grpo_bf16", "grpo_mis", "sc_mis", "sc_tis", "bf16", "grpo", "sc") if re.search(
            rf"-{arm}(?:-|$)", name)), "grpo")  # fmt: skip
        corrections = {"sc": "centering", "sc_mis": "both", "sc_tis": "both", "grpo_mis": "weights"}.get(arm, "none")
        control = name.replace(f"-{arm}", "-bf16" if name.startswith("s-") else "-grpo_bf16").replace("-int8only", "")
        exact = arm in ("grpo_bf16", "bf16")
        kind = "exact" if exact else "coarse"
        yield Run(name, "scan", make_log(name, columns), corrections, kind, None if exact else control)


SETTINGS = ("program", "filler", "lr", "prompts", "n", "grad_clip", "schedule", "optimizer", "normalise", "reduction")


def collapse() -> Iterator[Run]:
    """docs/results/collapse: the runs of the map, a row every ten steps, with their settings beside them."""
    file = HERE.parent / "collapse" / "exploration.parquet"
    table = pq.read_table(file).to_pydict()
    last = {run: row for row, run in enumerate(table["run"])}
    settings = {run: tuple(str(table[name][row]) for name in SETTINGS) for run, row in last.items()}
    about = {run: {name: table[name][row] for name in ("sampler", "arm", "seed")} for run, row in last.items()}
    controls = {
        (settings[run], known["seed"]): run
        for run, known in about.items()
        if known["sampler"] == "BF16" and known["arm"] in ("pg", "grpo")
    }
    corrections = {"sc": "centering", "sc_mis": "both", "sc_tis": "both", "mis": "weights", "tis": "weights"}
    quantities = ("reward_mean", "clean_reward_mean", "k3_kl", "entropy", "grad_norm", "response_length_mean",
                  "truncated_share")  # fmt: skip
    for name, columns in _logs(file):
        log = make_log(name, {quantity: columns[quantity] for quantity in quantities if quantity in columns})
        exact = about[name]["sampler"] == "BF16"
        control = controls.get((settings[name], about[name]["seed"]))
        yield Run(
            name,
            "collapse",
            log,
            corrections.get(about[name]["arm"], "none"),
            "exact" if exact else "coarse",
            None if exact else control,
        )


def verdicts(run: Run) -> dict[str, str]:
    """The verdict after each prefix of the log."""
    return {name: verdict_at(run, share) for name, share in PREFIXES.items()}


def verdict_at(run: Run, share: float) -> str:
    first = min(int(series.steps[0]) for series in run.log.series.values())
    return diagnose(run.log.until(first + (run.log.last_step - first) * share), run.corrections).verdict


def settled_at(run: Run, good: set[str]) -> float | None:
    """The share of the log, in tenths, from which on every verdict is right; None where the last one is not."""
    tenths = [verdict_at(run, tenth / 10) in good for tenth in range(1, 11)]
    return None if not tenths[-1] else (10 - tenths[::-1].index(False) + 1) / 10 if False in tenths else 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["development", "held-out"], default="development")
    parser.add_argument("--output", type=Path, help="folder: writes <half>.json with every verdict")
    parser.add_argument("--list", action="store_true", help="a line a run that is not right")
    arguments = parser.parse_args()
    runs = labelled()
    halves = {name: half_of(run) for name, run in runs.items()}
    chosen = {name: run for name, run in runs.items() if halves[name] == arguments.half}
    rows = [judged(run, right(run, runs)) for run in chosen.values()]
    print(report(rows))
    if arguments.list:
        for row in rows:
            bad = [prefix for prefix in PREFIXES if row[prefix] not in (*row["right"], "cannot_tell")]
            if bad or (row["lost"] and "harmless" in (row[prefix] for prefix in PREFIXES)):
                told = " ".join(row[prefix] for prefix in PREFIXES)
                fate = "lost" if row["lost"] else "held"
                print(f"{row['source']:<12} {row['run']:<28} {'/'.join(row['right']):<24} {fate} {told}")
    if arguments.output:
        (arguments.output / f"{arguments.half}.json").write_text(json.dumps(rows, indent=1) + "\n")


def half_of(run: Run) -> str:
    """The map came after the last change of the rules: none of it was used, and only the half that was to be unseen is
    counted."""
    if run.source == "collapse":
        return "held-out" if held_out(run.name) else "not used"
    return "held-out" if run.source != "exploration" and held_out(run.name) else "development"


def judged(run: Run, good: set[str]) -> dict:
    known = {"run": run.name, "source": run.source, "right": sorted(good), "lost": run.lost}
    return {**known, **verdicts(run), "settled": settled_at(run, good)}


def report(rows: list[dict]) -> str:
    """Tables in Markdown."""
    lines = [f"{len(rows)} runs: " + ", ".join(f"{n} {source}" for source, n in Counter(
        row["source"] for row in rows).items()), "",
        "| prefix | right | cannot_tell | wrong | right or cannot_tell | right where told | harmless, lost later |",
        "|---|---|---|---|---|---|---|"]  # fmt: skip
    for prefix in PREFIXES:
        told = Counter(
            "right" if row[prefix] in row["right"] else "unsure" if row[prefix] == "cannot_tell" else "wrong"
            for row in rows
        )
        early = sum(row["lost"] and row[prefix] == "harmless" for row in rows)
        share = told["right"] / max(told["right"] + told["wrong"], 1)
        lines.append(f"| {prefix} | {told['right']} | {told['unsure']} | {told['wrong']} | "
                     f"{(told['right'] + told['unsure']) / len(rows):.0%} | {share:.0%} | {early} |")  # fmt: skip
    lines += ["", "| right \\ verdict, whole log | " + " | ".join(VERDICTS) + " |", "|---" * (len(VERDICTS) + 1) + "|"]
    for label in sorted({"/".join(row["right"]) for row in rows}):
        counts = Counter(row["whole"] for row in rows if "/".join(row["right"]) == label)
        lines.append(f"| {label} | " + " | ".join(str(counts[verdict] or "") for verdict in VERDICTS) + " |")
    early = [row["settled"] for row in rows if row["settled"] is not None]
    counts = [sum(share <= tenth / 10 for share in early) for tenth in range(1, 11)]
    lines += ["", f"Right from then on, of the {len(early)} that are right in the end:", "",
              "| share of the log | " + " | ".join(f"{tenth}0 %" for tenth in range(1, 11)) + " |",
              "|---" * 11 + "|", "| runs | " + " | ".join(map(str, counts)) + " |"]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
