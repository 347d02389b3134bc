"""The figures: each function draws one from the runs of an experiment and returns a Matplotlib Figure."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from score_centering.figures.arms import ArmStyle
from score_centering.figures.canvas import (
    FONT,
    ONE_COLUMN,
    TWO_COLUMNS,
    EndLabel,
    axes_row,
    label_ends,
    label_margin,
    text_width,
)
from score_centering.figures.colours import readable_on_white
from score_centering.figures.experiment import Experiment
from score_centering.figures.numerals import power_of_ten
from score_centering.figures.series import Band, across_seeds, trailing_mean

HEAD_LENGTH, HEAD_HALF_WIDTH = 3.0, 1.6  # of an arrowhead along a path, in pixels of a figure at 100 dpi

STEP_LABEL = "Step (optimiser updates)"
REWARD_LABEL = "Mean reward (0 to 1)"
K3_LABEL = "K3 (nats per token)"

# Phase, column of timing.parquet, fill and hatch. Lightness falls steadily, so the order survives greyscale.
PHASES = (
    ("Rollout", "rollout_s", "#fde8b0", ""),
    ("Reward", "reward_s", "#f2b79f", "...."),
    ("Update", "update_s", "#c98bb9", ""),
    ("Weight sync", "sync_s", "#9a73b5", "////"),
    ("Validation", "validation_s", "#6d5a9c", ""),
    ("Checkpoint", "checkpoint_s", "#45407a", "\\\\\\\\"),
    ("Other", "other_s", "#1d1d3f", ""),
)
PHASE_TEXT = ("#262626", "#262626", "#262626", "#ffffff", "#ffffff", "#ffffff", "#ffffff")


def reward(experiment: Experiment) -> Figure:
    """Mean reward per step: trailing mean bold, raw values faint, range over seeds as a band."""
    figure, axes = _labelled_axes(experiment, ONE_COLUMN, 2.5)
    _curves(axes, experiment, "reward_mean", REWARD_LABEL)
    return figure


def k3_kl(experiment: Experiment) -> Figure:
    """K3 between trainer and sampler per step on a log axis."""
    figure, axes = _labelled_axes(experiment, ONE_COLUMN, 2.5)
    _curves(axes, experiment, "k3_kl", K3_LABEL, log=True)
    return figure


def validation_reward(experiment: Experiment) -> Figure:
    """Greedy validation reward at the steps that have one."""
    figure, axes = _labelled_axes(experiment, ONE_COLUMN, 2.5)
    _curves(axes, experiment, "val_reward_mean", "Greedy validation reward (0 to 1)", sparse=True)
    return figure


def clean_reward(experiment: Experiment) -> Figure:
    """Reward of the trained weights sampled in BF16 at T = 1, at the steps that have one."""
    figure, axes = _labelled_axes(experiment, ONE_COLUMN, 2.5)
    _curves(axes, experiment, "clean_reward_mean", "Reward in BF16 at T = 1 (0 to 1)", sparse=True)
    return figure


def response_length(experiment: Experiment) -> Figure:
    """Mean response length, and the share of rollouts that were cut at the limit."""
    figure, (left, right) = _labelled_pair(experiment)
    _curves(left, experiment, "response_length_mean", "Mean response length (tokens)", labels=False)
    _curves(right, experiment, "truncated_share", "Rollouts cut at the length limit")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    return figure


def head_mass(experiment: Experiment) -> Figure:
    """Probability inside the recorded head, and how strong the centering correction is (arms that record a head)."""
    figure, (left, right) = _labelled_pair(experiment)
    _curves(left, experiment, "head_mass_sampler", "Head mass of the sampler (0 to 1)", labels=False)
    _curves(right, experiment, "correction_abs_mean", "Correction, Σ|c| per token")
    return figure


def drift_meter(experiment: Experiment) -> Figure:
    """The drift's share of the arm's own gradient, and how much of it kept one direction (arms that measured it)."""
    figure, (left, right) = _labelled_pair(experiment)
    _curves(left, experiment, "drift_share", "Drift over the gradient, norms", sparse=True, labels=False)
    _curves(right, experiment, "drift_coherence", "Coherence of the drift (0 to 1)", sparse=True)
    return figure


def reward_vs_k3(experiment: Experiment) -> Figure:
    """Reward against K3 as a path through training: one panel an arm, the others faint behind it.

    The control's K3 is orders of magnitude smaller, so its panel has an x axis of its own.
    """
    looks = experiment.looks
    columns = 2 if len(looks) == 4 else min(3, len(looks))
    rows = -(-len(looks) // columns)
    width = {1: ONE_COLUMN, 2: 5.0, 3: TWO_COLUMNS}[columns]
    figure, grid = axes_row(
        width,
        0.62 + 1.5 * rows + 0.42 * (rows - 1),
        columns,
        rows=rows,
        gap=0.16,
        row_gap=0.42,
        top=0.22,
        sharey=True,
    )
    paths = {arm: reward_k3_path(experiment, arm)[1:] for arm in looks}
    for axes, (arm, look) in zip(grid.flat, looks.items(), strict=False):
        shown = {
            other: path for other, path in paths.items() if (other == experiment.control) == (arm == experiment.control)
        }
        every_k3 = np.concatenate([x for x, _ in shown.values()])
        floor = log_floor(every_k3)
        log_axis(axes.xaxis, floor, every_k3)
        padded_limits(axes, np.concatenate([y for _, y in paths.values()]))
        axes.set_title(look.label, color=readable_on_white(look.colour), loc="left", fontweight="bold", pad=3.0, y=1.0)
        for other, (x, y) in shown.items():
            if other != arm:
                axes.plot(np.maximum(x, floor), y, color="#d4d4d4", linewidth=0.8, zorder=1)
        _directed_path(axes, np.maximum(paths[arm][0], floor), paths[arm][1], look)
    for axes in grid.flat[len(looks) :]:
        axes.set_visible(False)
    for index in range(len(looks)):
        axes = grid.flat[index]
        axes.tick_params(labelleft=index % columns == 0)
    figure.supxlabel(K3_LABEL, fontsize=FONT, y=0.02, va="bottom")
    figure.supylabel(REWARD_LABEL, fontsize=FONT, x=0.01, ha="left")
    return figure


def timing(experiment: Experiment) -> Figure:
    """Mean wall-clock seconds of a step by phase, one bar an arm."""
    looks = experiment.looks
    left = (max(_widths(look.label for look in looks.values())) + 10.0) / 72.0
    height = 0.95 + 0.27 * len(looks)
    figure, grid = axes_row(TWO_COLUMNS, height, 1, left=left, right=0.55, bottom=0.42, top=0.38)
    axes = grid[0, 0]
    seconds = np.array([mean_phase_seconds(experiment, arm) for arm in looks])  # (arms, phases)
    rows = np.arange(len(looks))
    starts = np.cumsum(seconds, axis=1) - seconds
    totals = seconds.sum(axis=1)
    axes.set_xlim(0.0, totals.max() or 1.0)
    points_per_second = (TWO_COLUMNS - left - 0.55) * 72.0 / axes.get_xlim()[1]
    for phase, (name, _, fill, hatch) in enumerate(PHASES):
        axes.barh(
            rows, seconds[:, phase], left=starts[:, phase], height=0.68, color=fill, hatch=hatch, edgecolor="white",
            linewidth=0.4, label=name,
        )  # fmt: skip
        for row in rows:
            text = _three_digits(seconds[row, phase])
            if not hatch and _widths([text])[0] + 6.0 < seconds[row, phase] * points_per_second:
                axes.text(
                    starts[row, phase] + seconds[row, phase] / 2, row, text, ha="center", va="center",
                    color=PHASE_TEXT[phase], fontsize=FONT - 0.5,
                )  # fmt: skip
    for row, total in enumerate(totals):
        axes.annotate(
            f"{_three_digits(total)} s", (total, row), xytext=(3, 0), textcoords="offset points", va="center",
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(rows, [look.label for look in looks.values()])
    for text, look in zip(axes.get_yticklabels(), looks.values(), strict=True):
        text.set(color=readable_on_white(look.colour), fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("Mean time of a step (s)")
    shown = [phase for phase in range(len(PHASES)) if seconds[:, phase].any()]
    axes.legend(
        handles=[
            Patch(facecolor=PHASES[phase][2], hatch=PHASES[phase][3], edgecolor="white", label=PHASES[phase][0])
            for phase in shown
        ],
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(PHASES), frameon=False, borderpad=0.2,
        handlelength=1.2, handletextpad=0.4, columnspacing=1.1, borderaxespad=0.1,
    )  # fmt: skip
    return figure


FIGURES: Mapping[str, Callable[[Experiment], Figure]] = {
    "reward": reward,
    "k3_kl": k3_kl,
    "reward_vs_k3": reward_vs_k3,
    "validation_reward": validation_reward,
    "clean_reward": clean_reward,
    "response_length": response_length,
    "head_mass": head_mass,
    "drift_meter": drift_meter,
    "timing": timing,
}


def mean_phase_seconds(experiment: Experiment, arm: str) -> np.ndarray:
    """Mean seconds a step spent in each of PHASES, over the steps and seeds of one arm: (phases,) float64."""
    per_seed = []
    for run in experiment.of(arm):
        # A step's own seconds, and its checkpoint's, which the row of the step after it holds beside that step's.
        total = np.nan_to_num(run.timing["step_s"]).mean() + np.nan_to_num(run.timing["checkpoint_s"]).mean()
        known = [np.nan_to_num(run.timing[column]).mean() for _, column, _, _ in PHASES[:-1]]
        per_seed.append([*known, max(0.0, total - sum(known))])
    return np.mean(per_seed, axis=0)


def smoothed_band(experiment: Experiment, arm: str, column: str, window: int) -> Band:
    """Trailing mean over `window` steps of one column of one arm; mean and range over its seeds."""
    return across_seeds([(run.steps, trailing_mean(run.metrics[column], window)) for run in experiment.of(arm)])


def _labelled_axes(experiment: Experiment, width: float, height: float) -> tuple[Figure, Axes]:
    margin = label_margin([look.label for look in experiment.looks.values()])
    figure, grid = axes_row(width, height, 1, left=0.58, right=margin)
    return figure, grid[0, 0]


def _labelled_pair(experiment: Experiment) -> tuple[Figure, np.ndarray]:
    margin = label_margin([look.label for look in experiment.looks.values()])
    figure, grid = axes_row(TWO_COLUMNS, 2.4, 2, left=0.58, right=margin, gap=0.62)
    return figure, grid[0]


def _curves(
    axes: Axes,
    experiment: Experiment,
    column: str,
    label: str,
    *,
    log: bool = False,
    sparse: bool = False,
    labels: bool = True,
) -> None:
    """One curve per arm against the step. `sparse`: few measured steps, so each gets its marker and no smoothing."""
    looks = experiment.looks
    smooth, raw = {}, {}
    for arm in looks:
        smooth[arm] = smoothed_band(experiment, arm, column, 1 if sparse else experiment.smoothing).measured()
        raw[arm] = across_seeds([(run.steps, run.metrics[column]) for run in experiment.of(arm)]).measured()
    everything = np.concatenate([part for band in (*smooth.values(), *raw.values()) for part in (band.low, band.high)])
    axes.set_xlabel(STEP_LABEL)
    axes.set_ylabel(label)
    axes.set_xlim(*_step_limits(experiment))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if not everything.size:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured in these runs", ha="center", va="center", transform=axes.transAxes)
        return
    floor = log_floor(everything) if log else -np.inf
    if log:
        log_axis(axes.yaxis, floor, everything)
    else:
        padded_limits(axes, everything)
    ends = []
    for index, (arm, look) in enumerate(looks.items()):
        band, own = smooth[arm], raw[arm]
        if not band.steps.size:
            continue
        line = {"color": look.colour, "zorder": 3 + 0.1 * index}
        if not sparse:
            axes.plot(own.steps, np.maximum(own.mean, floor), linewidth=0.4, alpha=0.18, **line)
        if band.seeds > 1:
            axes.fill_between(
                band.steps, np.maximum(band.low, floor), np.maximum(band.high, floor), color=look.colour, alpha=0.15,
                linewidth=0,
            )  # fmt: skip
        middle = np.maximum(band.mean, floor)
        axes.plot(
            band.steps, middle, linestyle=(0, look.dashes) if look.dashes else "-", marker=look.marker,
            markersize=3.2, markeredgewidth=0.4, markeredgecolor="white", clip_on=False,
            markevery=1 if sparse else _marked(len(middle), index, len(looks)), **line,
        )  # fmt: skip
        ends.append(EndLabel(look.label, readable_on_white(look.colour), band.steps[-1], middle[-1]))
    if labels:
        label_ends(axes, ends)


def _step_limits(experiment: Experiment) -> tuple[float, float]:
    first = min(run.steps[0] for run in experiment.runs)
    last = max(run.steps[-1] for run in experiment.runs)
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _marked(count: int, index: int, arms: int) -> list[int]:
    """About five positions on a curve, shifted from arm to arm so that markers of close curves stay apart."""
    stride = max(1, count // 5)
    return list(range((index * stride) // max(arms, 1), count, stride))


def padded_limits(axes: Axes, values: np.ndarray) -> None:
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if values.size else (0.0, 1.0)
    pad = 0.06 * (high - low) or max(abs(high) * 0.05, 0.05)
    axes.set_ylim(0.0 if low >= 0.0 > low - pad else low - pad, high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def log_floor(values: np.ndarray) -> float:
    """Smallest value a log axis shows: the decade of the smallest positive one, at most 10 decades below the largest.

    Zeros and negative rounding residues are drawn on the floor, which the axis labels as "≤".
    """
    positive = values[values > 0]
    if not positive.size:
        return 1e-12
    lowest = np.floor(np.log10(positive.min()) + 1e-9)
    highest = np.ceil(np.log10(positive.max()) - 1e-9)
    clipped = lowest < highest - 10 or (values <= 0).any()
    return float(10.0 ** (max(lowest, highest - 10) - (1 if clipped else 0)))


def log_axis(axis: Axis, floor: float, values: np.ndarray) -> None:
    """Log scale around `values`, from `floor` up. When values lie on or below the floor, its tick says so."""
    values = values if values.size else np.array([floor])
    clipped = bool((values <= floor).any())
    low = floor if clipped else float(np.nanmin(values)) / 1.4
    high = max(float(np.nanmax(values)) * 1.6, low * 4.0)
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    narrow = high / low < 200.0
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=8))
    axis.set_minor_locator(LogLocator(base=10, subs=np.arange(1.0, 10.0), numticks=99) if narrow else NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(
        FuncFormatter(
            lambda value, _: f"{'≤' if clipped and abs(value / floor - 1) < 1e-3 else ''}{power_of_ten(value)}"
        )
    )


def path_window(experiment: Experiment) -> int:
    """Steps of the trailing mean along a path: a fifth of the longest run, so that direction is seen, not noise."""
    return max(experiment.smoothing, max(len(run.steps) for run in experiment.runs) // 5)


def reward_k3_path(experiment: Experiment, arm: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, K3 and reward of one arm, trailing means over `path_window` steps from the first complete window on; mean
    over seeds. (N,) each.
    """
    window = path_window(experiment)
    k3 = smoothed_band(experiment, arm, "k3_kl", window)
    reward = smoothed_band(experiment, arm, "reward_mean", window).mean
    both = np.flatnonzero(~(np.isnan(k3.mean) | np.isnan(reward)))
    complete = both[min(window, len(both)) - 1 :] if both.size else both
    return k3.steps[complete], k3.mean[complete], reward[complete]


def _directed_path(axes: Axes, x: np.ndarray, y: np.ndarray, look: ArmStyle) -> None:
    """The path, hollow circle at its start, filled one at its end, arrowheads at equal distances along it."""
    if not x.size:
        axes.text(0.5, 0.5, "K3 not measured", ha="center", va="center", transform=axes.transAxes)
        return
    axes.plot(x, y, color=look.colour, linewidth=1.1, zorder=3)
    back_to_data = axes.transData.inverted().transform
    heads = [back_to_data(head) for head in _arrowheads(axes.transData.transform(np.array([x, y]).T))]
    axes.add_collection(PolyCollection(heads, color=look.colour, linewidth=0.4, zorder=4), autolim=False)
    axes.plot(x[0], y[0], "o", color="white", markeredgecolor=look.colour, markersize=4.5, zorder=5, clip_on=False)
    axes.plot(x[-1], y[-1], "o", color=look.colour, markersize=4.5, zorder=6, clip_on=False)


def _arrowheads(points: np.ndarray, spacing: float = 34.0) -> list[np.ndarray]:
    """Triangles (3, 2) along a polyline (N, 2), one every `spacing`, none where it turns back on itself; in pixels."""
    distance = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])

    def at(along: float) -> np.ndarray:
        return np.array([np.interp(along, distance, points[:, axis]) for axis in (0, 1)])

    heads = []
    for along in np.arange(spacing, distance[-1] - HEAD_LENGTH, spacing):
        tip = at(along)
        way = tip - at(along - 2 * HEAD_LENGTH)
        if way.any():
            ahead = way / np.hypot(*way)
            base, aside = tip - HEAD_LENGTH * ahead, HEAD_HALF_WIDTH * ahead[::-1] * (1, -1)
            heads.append(np.array([tip, base + aside, base - aside]))
    return heads


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _widths(texts: Iterable[str]) -> list[float]:
    return [text_width(text) for text in texts]
