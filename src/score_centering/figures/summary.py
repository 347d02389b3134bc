"""summary.parquet and summary.md: one row per arm and seed."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from score_centering.figures.arms import styles
from score_centering.figures.experiment import Experiment, Run
from score_centering.figures.numerals import percent, scientific
from score_centering.figures.series import WINDOW, mean_of_measured, trailing_mean
from score_centering.runs import schema

COLLAPSED_BELOW = 0.1  # of the peak

COLUMNS = (
    ("arm", pa.string(), "", "name of the arm"),
    ("seed", pa.int32(), "", "seed of the run"),
    ("steps", pa.int32(), "steps", "last step of the run"),
    ("reward_first", pa.float64(), "1", f"mean reward over the first {WINDOW} steps"),
    ("reward_last", pa.float64(), "1", f"mean reward over the last {WINDOW} steps"),
    ("reward_peak", pa.float64(), "1", f"largest mean reward of any {WINDOW} consecutive steps"),
    ("reward_peak_step", pa.int32(), "step", "last step of those"),
    ("reward_share_kept", pa.float64(), "1", "reward_last over reward_peak; null where the peak is 0"),
    (
        "collapse_step",
        pa.int32(),
        "step",
        f"first step after the peak whose mean reward over {WINDOW} steps is below {percent(COLLAPSED_BELOW)} "
        "of the peak; null where that never happened",
    ),
    ("k3_kl_max", pa.float64(), "nats/token", "largest K3 of any step"),
    ("k3_kl_final", pa.float64(), "nats/token", f"mean K3 over the last {WINDOW} steps"),
    ("truncated_share", pa.float64(), "1", "mean over all steps of the share of rollouts cut at the length limit"),
    ("truncated_share_final", pa.float64(), "1", f"the same over the last {WINDOW} steps"),
    ("response_length_final", pa.float64(), "tokens", f"mean response length over the last {WINDOW} steps"),
    ("entropy_final", pa.float64(), "nats/token", f"mean entropy of the trainer's policy over the last {WINDOW} steps"),
    ("val_reward_last", pa.float64(), "1", "mean reward of the last greedy validation; null where there was none"),
    (
        "clean_reward_last",
        pa.float64(),
        "1",
        "mean reward of the trained weights in BF16 at temperature 1 in the last validation; null where there was none",
    ),
)
SUMMARY = pa.schema(
    [pa.field(name, kind, metadata={"unit": unit, "definition": text}) for name, kind, unit, text in COLUMNS]
)

OUTCOME = tuple(name for name in SUMMARY.names if name not in ("arm", "seed"))
READ = (
    "step",
    "reward_mean",
    "val_reward_mean",
    "clean_reward_mean",
    "k3_kl",
    "truncated_share",
    "response_length_mean",
    "entropy",
)


def run_row(metrics: Mapping[str, ArrayLike]) -> dict[str, float | int | None]:
    """The outcome of one run, from the columns of its metrics.parquet: the columns of SUMMARY behind `seed`.

    `metrics` is anything that gives a column by its name, such as a pandas DataFrame; NaN marks what was not measured.
    A run shorter than the window is one window. None where nothing was measured.
    """
    columns = {name: np.asarray(metrics[name], np.float64) for name in READ}
    measured = ~np.isnan(columns["reward_mean"])
    steps, reward = columns["step"][measured].astype(int), columns["reward_mean"][measured]
    row: dict[str, float | int | None] = dict.fromkeys(OUTCOME)
    row |= {
        "steps": int(columns["step"][-1]),
        "k3_kl_max": _number(np.fmax.reduce(columns["k3_kl"])),
        "k3_kl_final": _final(columns["k3_kl"]),
        "truncated_share": _number(mean_of_measured(columns["truncated_share"])),
        "truncated_share_final": _final(columns["truncated_share"]),
        "response_length_final": _final(columns["response_length_mean"]),
        "entropy_final": _final(columns["entropy"]),
        "val_reward_last": _last(columns["val_reward_mean"]),
        "clean_reward_last": _last(columns["clean_reward_mean"]),
    }
    if not reward.size:
        return row
    window = min(WINDOW, len(reward))
    smoothed = trailing_mean(reward, window)[window - 1 :]  # complete windows only
    smoothed_steps = steps[window - 1 :]
    peak = int(np.argmax(smoothed))
    low = smoothed[peak:] < COLLAPSED_BELOW * smoothed[peak]
    return row | {
        "reward_first": float(smoothed[0]),
        "reward_last": float(smoothed[-1]),
        "reward_peak": float(smoothed[peak]),
        "reward_peak_step": int(smoothed_steps[peak]),
        "reward_share_kept": float(smoothed[-1] / smoothed[peak]) if smoothed[peak] > 0 else None,
        "collapse_step": int(smoothed_steps[peak + int(np.argmax(low))]) if low.any() else None,
    }


def summarise_run(run: Run) -> dict[str, float | int | str | None]:
    """One row of the summary."""
    return {"arm": run.arm, "seed": run.seed, **run_row(run.metrics)}


def summarise(experiment: Experiment) -> pa.Table:
    """Table of schema SUMMARY, its metadata naming the experiment and the smoothing window."""
    rows = [summarise_run(run) for run in experiment.runs]
    metadata = {"experiment": experiment.name, "window": str(WINDOW)}
    return pa.Table.from_pylist(rows, SUMMARY).replace_schema_metadata(metadata)


def write_summary(table: pa.Table, folder: Path, labels: Mapping[str, str] = MappingProxyType({})) -> list[Path]:
    """Writes summary.parquet and summary.md into `folder`; `labels` as for `styles`."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    (folder / "summary.parquet").write_bytes(schema.table_bytes(table, metadata))
    (folder / "summary.md").write_text(markdown(table, labels), encoding="utf-8")
    return [folder / "summary.parquet", folder / "summary.md"]


def markdown(table: pa.Table, labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """The summary as a Markdown document: the table, then what each column means."""
    names = table.column_names
    looks = styles(table["arm"].to_pylist(), labels=labels)
    lines = [
        f"# Summary of experiment {table.schema.metadata[b'experiment'].decode()}",
        "",
        f"| {' | '.join(names)} |",
        f"|{'|'.join(':--' if name == 'arm' else '--:' for name in names)}|",
    ]
    lines += [f"| {' | '.join(display(name, row[name]) for name in names)} |" for row in table.to_pylist()]
    named = ", ".join(f"`{arm}` = {look.label}" for arm, look in looks.items() if look.label != arm)
    lines += ["", "–: not measured, or it never happened.", *([f"Arms: {named}."] if named else []), ""]
    lines += [f"- `{name}`{f' ({unit})' if unit not in ('', '1') else ''}: {text}" for name, _, unit, text in COLUMNS]
    return "\n".join(lines) + "\n"


def display(name: str, value: float | int | str | None) -> str:
    """A cell as people read it: shares in per cent, rewards with three decimals, K3 with two significant digits."""
    if value is None:
        return "–"
    if name in ("reward_share_kept", "truncated_share", "truncated_share_final"):
        return percent(value, 1)
    if name.startswith("k3_kl"):
        return scientific(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _final(values: np.ndarray) -> float | None:
    return _number(mean_of_measured(values[-WINDOW:]))


def _last(values: np.ndarray) -> float | None:
    return _number([np.nan, *values[~np.isnan(values)]][-1])


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
