"""Draw the figures of the search from curves.parquet: python docs/results/scan/draw.py [FOLDER]"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from score_centering.figures.arms import styles
from score_centering.figures.canvas import (
    ONE_COLUMN,
    TWO_COLUMNS,
    EndLabel,
    axes_row,
    drawing,
    label_ends,
    label_margin,
    save,
)
from score_centering.figures.colours import readable_on_white
from score_centering.figures.series import across_seeds, trailing_mean

FOLDER = Path(__file__).parent
SEARCHED = ("grpo_bf16", "grpo", "sc")
ALL = (*SEARCHED, "sc_mis", "sc_tis", "grpo_mis")


def runs(prefix: str, arms: Sequence[str], seeds: Sequence[int]) -> dict[str, list[str]]:
    """The runs of each arm, one a seed."""
    return {arm: [f"{prefix}-{arm}-seed{seed}" for seed in seeds] for arm in arms}


def single(control: str, prefix: str) -> dict[str, list[str]]:
    """One run an arm; the control has no quantised cache, so that several panels share it."""
    return {"grpo_bf16": [control], "grpo": [f"{prefix}-grpo"], "sc": [f"{prefix}-sc"]}


PANELS = {
    "INT8 + INT4 KV, lr 1e-5": single("s-adamw1e-5-bf16", "s-adamw1e-5"),
    "INT8 + INT4 KV, lr 3e-5": single("s-adamw3e-5-bf16", "s-adamw3e-5"),
    "INT8, lr 1e-5": single("s-adamw1e-5-bf16", "s-int8only-adamw1e-5"),
    "INT8, lr 3e-5": single("s-adamw3e-5-bf16", "s-int8only-adamw3e-5"),
}
CONFIRMED = {
    "INT8, lr 3e-5, seeds 1-3": runs("c", SEARCHED, (1, 2, 3)),
    "INT8, lr 1e-5, seeds 4-6": runs("h", ALL, (4, 5, 6)),
}
LONG = {"INT8, lr 1e-5, about 280 tokens a response, seed 7": runs("long", SEARCHED, (7,))}


def curve(curves: pd.DataFrame, run: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (S,) and the trailing mean over 10 steps (S,) of one run's column."""
    rows = curves[(curves["run"] == run) & (curves["step"] > 0)].sort_values("step")
    return rows["step"].to_numpy(), trailing_mean(rows[column].to_numpy(np.float64))


def draw(
    curves: pd.DataFrame, panels: Mapping[str, Mapping[str, Sequence[str]]], size: tuple[float, float], top: float
) -> Figure:
    """A column a panel, its runs by arm: reward (0 to `top`) above, K3 below, mean and range over seeds; inches."""
    looks = styles(arm for arms in panels.values() for arm in arms)
    margin = label_margin([look.label for look in looks.values()])
    figure, grid = axes_row(
        *size, len(panels), rows=2, right=margin, top=0.25, gap=0.12, row_gap=0.15, sharex=True, sharey="row"
    )
    for column, (title, arms) in enumerate(panels.items()):
        for row, name in enumerate(("reward_mean", "k3_kl")):
            axes, labels = grid[row, column], []
            for arm, seeds in arms.items():
                look, band = looks[arm], across_seeds([curve(curves, run, name) for run in seeds])
                axes.plot(band.steps, band.mean, color=look.colour, dashes=look.dashes)
                if band.seeds > 1:
                    axes.fill_between(band.steps, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
                colour = readable_on_white(look.colour)
                labels.append(EndLabel(look.label, colour, band.steps[-1], band.mean[-1]))
            if row:
                axes.set_yscale("log")
                axes.set_xlabel("training step")
            else:
                axes.set_ylim(0, top)
                axes.set_title(title, loc="left")
            if column == len(panels) - 1:
                label_ends(axes, labels)
    grid[0, 0].set_ylabel("mean reward")
    grid[1, 0].set_ylabel("K3 KL (nats a token)")
    return figure


def main(output: Path = FOLDER) -> None:
    curves = pd.read_parquet(FOLDER / "curves.parquet")
    with drawing():
        save(draw(curves, PANELS, (TWO_COLUMNS, 3.0), 0.5), output / "scan")
        save(draw(curves, CONFIRMED, (TWO_COLUMNS, 4.4), 0.5), output / "confirm")
        save(draw(curves, LONG, (ONE_COLUMN + 1.0, 3.0), 0.7), output / "long")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
