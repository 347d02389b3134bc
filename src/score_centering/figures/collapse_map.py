"""The figure of the map of the collapse: a tile a cell, coloured by its verdict."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from score_centering.figures.arms import styles
from score_centering.figures.canvas import FONT, axes_row, text_width
from score_centering.figures.collapse_study import WORDS, verdicts
from score_centering.figures.colours import contrast
from score_centering.settings.stages import CollapseStage

LOOKS = {
    "nothing": ("#e8e8e8", "·"),
    "saved": ("#0072b2", "S"),
    "helped": ("#9ecae9", "s"),
    "both": ("#d55e00", "×"),
    "costs": ("#f0c27a", "!"),
    "unstable": ("#8a8a8a", "~"),
}
"""Verdict → colour, and the mark that tells it in grey."""
NARROW, WIDE = 0.2, 0.62  # inches a tile without and with numbers
NUMBERS_UP_TO = 9  # columns


def draw_map(table: pa.Table, stage: CollapseStage) -> Figure:
    """A row of tiles for each bound and entropy, a column for each precision and rate; a panel a corrected arm.

    Letters tell the verdict in grey; a small map has the mean last rewards below, uncorrected | corrected.
    """
    cells = verdicts(table.to_pandas(), stage.arms)
    grid = stage.grid
    columns = [(precision, rate) for precision in grid.precisions for rate in grid.rates]
    rows = [(bound, entropy) for bound in grid.bounds for entropy in grid.entropies]
    names = [f"{bound}, {entropy}" if len(grid.entropies) > 1 else bound for bound, entropy in rows]
    looks, arms = styles(stage.arms), stage.arms[1:]
    numbers = len(columns) <= NUMBERS_UP_TO
    tile = WIDE if numbers else NARROW
    left, bottom, top = (max(map(text_width, names)) + 14.0) / 72.0, 0.42, 0.24
    key = {word: text for word, text in WORDS.items() if len(cells) and (cells["verdict"] == word).any()}
    legend = 0.16 * len(key) + 0.1
    height = bottom + legend + len(arms) * (top + (WIDE if numbers else NARROW) * len(rows)) + 0.45 * (len(arms) - 1)
    width = max(left + tile * len(columns) + 0.1, 3.5)
    figure, panels = axes_row(
        width, height, 1, rows=len(arms), left=left, right=width - left - tile * len(columns), bottom=bottom + legend,
        top=top, row_gap=top + 0.45,
    )  # fmt: skip
    for axes, arm in zip(panels[:, 0], arms, strict=True):
        own = cells[cells["arm"] == arm] if len(cells) else cells
        _tiles(axes, own, columns, rows, numbers)
        axes.set_title(f"{looks[stage.arms[0]].label} against {looks[arm].label}", loc="left", pad=4.0)
        axes.set_yticks(range(len(rows)), names)
        _precisions(axes, grid.precisions, grid.rates)
    corrected = looks[arms[0]].label if len(arms) == 1 else "the corrected arm"
    figure.legend(
        handles=[Patch(color=LOOKS[word][0]) for word in key],
        labels=[f"{LOOKS[word][1]}  {text.format(arm=corrected)}" for word, text in key.items()],
        loc="lower left", bbox_to_anchor=(left / width, 0.0), frameon=False, borderaxespad=0.2, handlelength=1.0,
    )  # fmt: skip
    return figure


def _tiles(
    axes: Axes,
    cells: pd.DataFrame,
    columns: Sequence[tuple[str, float]],
    rows: Sequence[tuple[str, str]],
    numbers: bool,
) -> None:
    codes, order = np.full((len(rows), len(columns)), np.nan), list(LOOKS)
    for cell in cells.itertuples():
        y, x = rows.index((cell.bound, cell.entropy)), columns.index((cell.precision, cell.rate))
        codes[y, x] = order.index(cell.verdict)
        colour, mark = LOOKS[cell.verdict]
        ink = {"color": max(("#262626", "#ffffff"), key=lambda shade: contrast(shade, colour)), "ha": "center"}
        axes.text(x, y - 0.14 * numbers, mark, va="center", fontsize=FONT + 2 * numbers, **ink)
        if numbers:
            ends = f"{cell.uncorrected_last:.2f} | {cell.corrected_last:.2f}"
            axes.text(x, y + 0.24, ends, va="center", fontsize=FONT - 1, **ink)
    colours = ListedColormap([colour for colour, _ in LOOKS.values()])
    axes.imshow(codes, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    axes.grid(visible=True, which="minor", axis="both", color="white", linewidth=1.0)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _precisions(axes: Axes, precisions: Sequence[str], rates: Sequence[float]) -> None:
    """Rates as tick labels, and below them the precision that they belong to."""
    axes.set_xticks(range(len(precisions) * len(rates)), [f"{rate:g}" for rate in rates] * len(precisions))
    for index, precision in enumerate(precisions):
        middle = (index + 0.5) * len(rates) - 0.5
        axes.annotate(
            precision, (middle, 0), (0, -13), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", va="top", fontsize=FONT - 0.5,
        )  # fmt: skip
