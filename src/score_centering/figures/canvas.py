"""Matplotlib set up once: fonts, sizes in inches, direct labels, and files that are the same bytes every time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from score_centering.figures import typeface
from score_centering.figures.series import spread

ONE_COLUMN = 3.5  # inches
TWO_COLUMNS = 7.0
FONT = 7.0  # points, at the size the figure is printed
FORMATS = ("png", "svg", "pdf")

STYLE = {
    "font.family": typeface.FAMILIES,
    "font.size": FONT,
    "axes.labelsize": FONT,
    "axes.titlesize": FONT,
    "xtick.labelsize": FONT - 0.5,
    "ytick.labelsize": FONT - 0.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4d4d4d",
    "axes.labelcolor": "#262626",
    "text.color": "#262626",
    "xtick.color": "#4d4d4d",
    "ytick.color": "#4d4d4d",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "ytick.minor.size": 1.2,
    "ytick.minor.width": 0.4,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "butt",
    "hatch.linewidth": 0.4,
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # looks the same whatever fonts the reader has
    "svg.hashsalt": "score-centering",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,  # Matplotlib 3.11 cuts the fonts of a PDF as this one needs it
    "axes.unicode_minus": True,
}

# None: Matplotlib leaves the entry out, so that no date and no version reaches the files.
NO_METADATA = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

typeface.use()


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's defaults and then STYLE, whatever matplotlibrc the user has."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem`.png, .svg and .pdf; the same figure always gives the same bytes."""
    paths = [stem.with_name(f"{stem.name}.{extension}") for extension in FORMATS]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for extension, path in zip(FORMATS, paths, strict=True):
        figure.savefig(path, format=extension, metadata=NO_METADATA[extension])
    return paths


@cache
def text_width(text: str, size: float = FONT) -> float:
    """Width of one line in points."""
    return float(TextPath((0, 0), text, size=size, prop=FontProperties(family=typeface.FAMILIES)).get_extents().width)


def label_margin(labels: Sequence[str]) -> float:
    """Inches that direct labels need to the right of an axes, with their leader lines."""
    return (max((text_width(label) for label in labels), default=0.0) + 14.0) / 72.0


def axes_row(
    width: float,
    height: float,
    columns: int,
    *,
    rows: int = 1,
    left: float = 0.5,
    right: float = 0.08,
    bottom: float = 0.4,
    top: float = 0.12,
    gap: float = 0.55,
    row_gap: float = 0.3,
    **shared: bool | str,
) -> tuple[Figure, np.ndarray]:
    """A figure of `width` × `height` inches with margins and gaps in inches; axes (rows, columns)."""
    figure = Figure(figsize=(width, height))
    inner_width = (width - left - right - gap * (columns - 1)) / columns
    inner_height = (height - bottom - top - row_gap * (rows - 1)) / rows
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=gap / inner_width,
        hspace=row_gap / inner_height,
    )
    return figure, axes


@dataclass(frozen=True)
class EndLabel:
    text: str
    colour: str
    x: float  # data coordinates of the point that is labelled
    y: float


def label_ends(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Writes each label right of the axes, level with its curve's end, moved apart where they would overlap.

    Call it last: it reads the axes' limits. A thin line leads from 1.5 points off the curve's end to 3 off its label.
    """
    width, height = axes.get_position().size * axes.figure.get_size_inches() * 72.0  # points
    ends = [axes.transAxes.inverted().transform(axes.transData.transform((label.x, label.y))) for label in labels]
    heights = spread([y for _, y in ends], gap=1.3 * FONT / height, low=0.0, high=1.0)
    leaders = []
    for label, end, moved in zip(labels, ends, heights, strict=True):
        axes.text(1.0 + 9.0 / width, moved, label.text, color=label.colour, va="center", transform=axes.transAxes)
        start, stop = end * (width, height), np.array([width + 6.0, moved * height])
        start += 1.5 * (stop - start) / np.hypot(*(stop - start))
        leaders.append(np.array([start, stop]) / (width, height))
    axes.add_collection(
        LineCollection(
            leaders, colors=[label.colour for label in labels], linewidths=0.5, transform=axes.transAxes, clip_on=False
        ),
        autolim=False,
    )
