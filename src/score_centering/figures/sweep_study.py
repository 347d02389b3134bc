"""The mismatch sweep: precision against arm as one table and one heat map."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from score_centering.figures.arms import styles
from score_centering.figures.canvas import FONT, axes_row, text_width
from score_centering.figures.colours import contrast, readable_on_white
from score_centering.figures.numerals import percent, scientific
from score_centering.figures.scan import read_run, scan_table
from score_centering.figures.summary import WINDOW

COLOURS = LinearSegmentedColormap.from_list("reward", ["#ffffff", "#9ecae9", "#0072b2", "#00304d"])


def sweep_table(runs: Sequence[Path]) -> pa.Table:
    """One row a run, in the order given; run folders are …/<precision>/<arm>/seed<k>."""
    return scan_table([read_run(run, {"precision": run.parents[1].name}) for run in runs])


def draw_sweep(table: pa.Table) -> Figure:
    """The heat map of the last steps' reward by the rollouts' precision."""
    runs = table.to_pandas()
    steps = int(runs["steps"].max())
    names = {name: name.replace("_", " + ") for name in dict.fromkeys(runs["precision"])}
    title = f"Mean reward of the last {min(WINDOW, steps)} of {steps} steps"
    return heat_map(runs, "precision", names, "reward_last", title, "by the rollouts' precision")


def heat_map(runs: pd.DataFrame, by: str, names: Mapping[str, str], value: str, title: str, explained: str) -> Figure:
    """Colour and large number: `value`, mean over seeds. Below: share of the peak kept, largest K3.

    Args:
        runs: a row a run, with `arm`, the columns of `run_row` and the column `by`.
        names: values of `by`, in the order of the columns → their labels.
        title, explained: first line of the title, and what follows the number of seeds in the second.
    """
    arms, columns = list(dict.fromkeys(runs["arm"])), list(names)
    looks = styles(arms)
    left = (max(text_width(look.label) for look in looks.values()) + 12.0) / 72.0
    figure, grid = axes_row(
        left + 0.95 * len(columns) + 0.08, 0.5 + 0.62 * len(arms) + 0.3, 1, left=left, bottom=0.3, top=0.5
    )
    axes = grid[0, 0]
    reward = _grid(runs, value, by, arms, columns)
    axes.imshow(reward, cmap=COLOURS, vmin=0.0, vmax=1.0, aspect="auto")
    kept, k3 = (_grid(runs, column, by, arms, columns) for column in ("reward_share_kept", "k3_kl_max"))
    for row in range(len(arms)):
        for column in range(len(columns)):
            background = to_hex(COLOURS(reward[row, column]))
            ink = max(("#262626", "#ffffff"), key=lambda colour: contrast(colour, background))
            text = {"color": ink, "ha": "center"}
            axes.text(column, row - 0.12, f"{reward[row, column]:.2f}", fontsize=FONT + 3, va="center", **text)
            below = f"kept {percent(kept[row, column])}\nK3 ≤ {scientific(k3[row, column])}"
            axes.text(column, row + 0.28, below, fontsize=FONT - 1.5, va="center", linespacing=1.25, **text)
    axes.set_xticks(range(len(columns)), names.values())
    axes.set_yticks(range(len(arms)), [looks[arm].label for arm in arms])
    for label, arm in zip(axes.get_yticklabels(), arms, strict=True):
        label.set(color=readable_on_white(looks[arm].colour), fontsize=FONT)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(arms)) - 0.5, minor=True)
    axes.grid(visible=True, which="minor", axis="both", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    seeds = runs["seed"].nunique()
    averaged = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    axes.set_title(f"{title}\n{averaged}; {explained}", loc="left", pad=5.0)
    return figure


def _grid(runs: pd.DataFrame, value: str, by: str, arms: Sequence[str], columns: Sequence[str]) -> np.ndarray:
    """Mean over seeds: (arms, columns), NaN where nothing was measured."""
    means = runs.groupby(["arm", by])[value].mean()
    return np.array([[means.get((arm, column), np.nan) for column in columns] for arm in arms], np.float64)
