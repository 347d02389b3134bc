"""Drift, the mechanism: how far weights move without a learning signal, and what that does to the reward."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from safetensors.numpy import load_file

from score_centering.figures.canvas import TWO_COLUMNS, EndLabel, axes_row, label_ends, label_margin
from score_centering.figures.colours import readable_on_white
from score_centering.figures.plots import STEP_LABEL, log_axis, log_floor
from score_centering.figures.scan import described
from score_centering.figures.series import Band, across_seeds

DRIFT = described(
    (
        ("sampler", pa.string(), "", "online: synced after every update; frozen: the policy of the start"),
        ("centering", pa.string(), "", "none, exact (the whole vocabulary is recorded) or k<K>"),
        ("seed", pa.int32(), "", "seed of the run"),
        ("step", pa.int32(), "1", "updates made so far"),
        ("displacement", pa.float64(), "1", "Euclidean distance of the FP32 weights from those of step 0"),
        ("displacement_relative", pa.float64(), "1", "the same over the norm of those of step 0"),
        (
            "distance_to_exact",
            pa.float64(),
            "1",
            "Euclidean distance from the exactly centered run of the same sampler and seed, at its checks",
        ),
        ("reward_rollouts", pa.float64(), "1", "mean reward of the step's rollouts, which nothing learns from"),
        ("reward_sampled", pa.float64(), "1", "mean reward of the trainer's policy in low precision, held-out, T = 1"),
        ("reward_greedy", pa.float64(), "1", "the same, greedy"),
        ("truncated_share", pa.float64(), "1", "share of the step's rollouts cut at the response limit"),
        ("response_length_mean", pa.float64(), "tokens", "mean generated tokens of the step's rollouts"),
        ("loss", pa.float64(), "nats", "value of the objective"),
        ("grad_norm", pa.float64(), "1", "norm of the gradient before clipping"),
        ("learning_rate", pa.float64(), "1", "learning rate of the update"),
        ("entropy", pa.float64(), "nats/token", "mean entropy of the trainer's next-token distribution"),
        ("k3_kl", pa.float64(), "nats/token", "K3 between trainer and sampler"),
        ("head_mass_sampler", pa.float64(), "1", "mean mass of the recorded head under the sampler"),
    )
)
SAMPLERS = {"online": "Sampler synced every step", "frozen": "Sampler fixed at the start"}
NONE, EXACT = "none", "exact"
PANELS = {
    "displacement": "Displacement ‖θₜ − θ₀‖",
    "distance_to_exact": "Distance from exact",
    "reward_sampled": "Held-out reward (0 to 1)",
}
LOOKS = (
    ("#0072b2", ()),
    ("#d55e00", ()),
    ("#56b4e9", (4.5, 1.5)),
    ("#009e73", (1.2, 1.0)),
    ("#7a4fbf", (6, 1.2, 1.2, 1.2)),
)


def drift_table(files: Sequence[Path]) -> pa.Table:
    """The rows of all runs, with their distances from the exact run of the same sampler and seed.

    Beside each parquet file lies a .safetensors file with the run's weights at its checks, as `<step>/<name>`.
    """
    tables = [pq.read_table(path) for path in files]
    weights = [load_file(path.with_suffix(".safetensors")) for path in files]
    runs = [tuple(table[name][0].as_py() for name in ("sampler", "seed", "centering")) for table in tables]
    rows = []
    for run, table, own in zip(runs, tables, weights, strict=True):
        exact = weights[runs.index((*run[:2], EXACT))]
        squares: dict[int, float] = {}
        for name, tensor in own.items():
            step = int(name.partition("/")[0])
            squares[step] = squares.get(step, 0.0) + float(((tensor - exact[name]).astype(np.float64) ** 2).sum())
        known = {} if run[2] == EXACT else squares
        rows += [
            row | {"distance_to_exact": known[row["step"]] ** 0.5 if row["step"] in known else None}
            for row in table.to_pylist()
        ]
    return pa.Table.from_pylist(rows, DRIFT).replace_schema_metadata(tables[0].schema.metadata)


def draw_drift(table: pa.Table) -> Figure:
    """Rows: displacement of the weights; distance from the exactly centered run; held-out reward. Left online, right
    frozen."""
    rows = table.to_pandas()
    variants = list(dict.fromkeys(rows["centering"]))
    margin = label_margin([_label(variant) for variant in variants])
    figure, grid = axes_row(
        TWO_COLUMNS, 5.4, 2, rows=3, left=0.62, right=margin, top=0.3, gap=margin + 0.42, row_gap=0.22
    )
    for axes, title in zip(grid[0], SAMPLERS.values(), strict=True):
        axes.set_title(title, loc="left", fontweight="bold")
    for row, (column, label) in zip(grid, PANELS.items(), strict=True):
        values = rows[column].dropna().to_numpy()
        for axes, sampler in zip(row, SAMPLERS, strict=True):
            axes.set_xlim(0, rows["step"].max())
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.tick_params(labelbottom=column == list(PANELS)[-1])
            if column == "distance_to_exact":
                log_axis(axes.yaxis, log_floor(values), values)
            else:
                axes.set_ylim(0.0, 1.06 * values.max())
            label_ends(axes, _curves(axes, rows[rows["sampler"] == sampler], variants, column))
        row[0].set_ylabel(label)
    for axes in grid[-1]:
        axes.set_xlabel(STEP_LABEL)
    return figure


def _band(rows: pd.DataFrame, variant: str, column: str) -> Band:
    runs = rows[rows["centering"] == variant].groupby("seed")
    return across_seeds([(run["step"].to_numpy(), run[column].to_numpy()) for _, run in runs]).measured()


def _curves(axes: Axes, rows: pd.DataFrame, variants: Sequence[str], column: str) -> list[EndLabel]:
    """Draws one curve a variant that was measured; their labels."""
    ends = []
    for (colour, dashes), variant in zip(LOOKS, variants, strict=False):
        band = _band(rows, variant, column)
        if not band.steps.size:
            continue
        if band.seeds > 1:
            axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.12, linewidth=0)
        marker = "." if len(band.steps) < 12 else ""
        axes.plot(
            band.steps, band.mean, color=colour, linestyle=(0, dashes) if dashes else "-", marker=marker, clip_on=False
        )
        ends.append(EndLabel(_label(variant), readable_on_white(colour), band.steps[-1], band.mean[-1]))
    return ends


def _label(variant: str) -> str:
    return {NONE: "no centering", EXACT: "centered, exact"}.get(variant, f"K = {variant.removeprefix('k')}")
