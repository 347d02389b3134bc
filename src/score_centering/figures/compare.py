"""Two experiments side by side: one table, overlaid curves per arm, and the settings in which they differ."""

import json
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from score_centering.figures.arms import in_order, styles
from score_centering.figures.canvas import FONT, TWO_COLUMNS, axes_row
from score_centering.figures.colours import readable_on_white
from score_centering.figures.experiment import Experiment
from score_centering.figures.numerals import percent, scientific
from score_centering.figures.paired import paired
from score_centering.figures.plots import (
    K3_LABEL,
    REWARD_LABEL,
    STEP_LABEL,
    log_axis,
    log_floor,
    padded_limits,
    smoothed_band,
)
from score_centering.figures.summary import run_row
from score_centering.figures.verdict import rollout_precision
from score_centering.precision.registry import UNQUANTISED_PRECISION
from score_centering.settings import UserError
from score_centering.settings.dotted import differing

SHOWN = (("Last reward", "reward_last"), ("Peak kept", "reward_share_kept"), ("Final K3", "k3_kl_final"))
OVERLAYS = {"reward": ("reward_mean", REWARD_LABEL, False), "k3_kl": ("k3_kl", K3_LABEL, True)}
STYLES = (("-", "#0072b2"), ((0, (3.0, 1.2)), "#d55e00"))  # line and colour of each experiment
ABSENT = "(absent)"


def names(first: Experiment, second: Experiment) -> tuple[str, str]:
    """Their names, or their folders where both have one name."""
    return (first.name, second.name) if first.name != second.name else (str(first.folder), str(second.folder))


def control_of(first: Experiment, second: Experiment) -> str | None:
    """The arm without mismatch, known by its settings whatever its name: BF16 rollouts, no perturbation."""
    for experiment in (first, second):
        for arm in experiment.arms:
            run = experiment.of(arm)[0]
            unperturbed = run.identity["config"].get("perturbation") is None
            if rollout_precision(run) == UNQUANTISED_PRECISION.label and unperturbed:
                return arm
    return None


def common_arms(first: Experiment, second: Experiment) -> list[str]:
    arms = in_order(set(first.arms) & set(second.arms), control_of(first, second))
    if not arms:
        raise UserError(
            f"no arm in common: {first.folder} has {', '.join(first.arms)}, "
            f"{second.folder} has {', '.join(second.arms)}"
        )
    return arms


def last_common_step(first: Experiment, second: Experiment, arm: str) -> float:
    """The last step that every run of `arm` in either experiment has."""
    return min(run.steps[-1] for experiment in (first, second) for run in experiment.of(arm))


def means(experiment: Experiment, arm: str, last: float) -> dict[str, float]:
    """Means over seeds of the summary's numbers up to step `last`; NaN where one has no value."""
    rows = [
        run_row({name: column[run.steps <= last] for name, column in run.metrics.items()}) for run in experiment.of(arm)
    ]
    return {
        column: float(np.mean([np.nan if row[column] is None else row[column] for row in rows])) for _, column in SHOWN
    }


def table(first: Experiment, second: Experiment) -> str:
    """Markdown: every arm of either experiment, its numbers in both up to the last step that both have, and the
    difference in final reward; paired where both met the same problems."""
    one, other = names(first, second)
    heads = [
        "Arm",
        "Steps",
        *(f"{title}, {name}" for title, _ in SHOWN for name in (one, other)),
        "Difference in last reward",
        "Paired, 95 %",
    ]
    control = control_of(first, second)
    looks = styles(in_order([*first.arms, *second.arms], control), control)
    lines = [f"| {' | '.join(heads)} |", f"|:--|{'--:|' * (len(heads) - 1)}"]
    for arm, look in looks.items():
        last = last_common_step(first, second, arm)
        found = [means(experiment, arm, last) if arm in experiment.arms else {} for experiment in (first, second)]
        cells = [_cell(column, numbers.get(column, np.nan)) for _, column in SHOWN for numbers in found]
        change = found[1].get("reward_last", np.nan) - found[0].get("reward_last", np.nan)
        pair = paired(first.of(arm), second.of(arm))
        cells += [
            "–" if np.isnan(change) else f"{change:+.3f}",
            "–" if pair is None else f"{pair.difference:+.3f} ± {pair.half_width:.3f}",
        ]
        lines.append(f"| {look.label} | {last:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def differing_settings(first: Experiment, second: Experiment) -> list[tuple[str, str, str, list[str]]]:
    """(setting, value in the first, value in the second, arms), for each setting in which common arms differ."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for arm in common_arms(first, second):
        for name, values in differing([_config(experiment, arm) for experiment in (first, second)], ABSENT).items():
            one, other = (value if value is ABSENT else json.dumps(value) for value in values)
            found.setdefault((name, one, other), []).append(arm)
    return [(*difference, arms) for difference, arms in sorted(found.items())]


def diff(first: Experiment, second: Experiment) -> str:
    """The differing settings as a diff: "-" the first experiment's value, "+" the second's."""
    one, other = names(first, second)
    everyone = common_arms(first, second)
    lines = [f"--- {one}", f"+++ {other}"]
    for setting, before, after, arms in differing_settings(first, second):
        only = "" if arms == everyone else f" ({', '.join(arms)})"
        lines.append(f"@@ {setting}{only} @@")
        lines += [f"-{before}", f"+{after}"]
    return "\n".join(lines if len(lines) > 2 else [*lines, "no setting differs"]) + "\n"


def document(first: Experiment, second: Experiment) -> str:
    """Everything as one Markdown page."""
    one, other = names(first, second)
    figures = "\n".join(f"![{label}]({key}.svg)" for key, (_, label, _) in OVERLAYS.items())
    return (
        f"# {one} and {other}\n\n{table(first, second)}\n## Curves\n\n{figures}\n\n"
        f"## Settings that differ\n\n```diff\n{diff(first, second)}```\n"
    )


def overlay(first: Experiment, second: Experiment, column: str, label: str, log: bool) -> Figure:
    """One panel per common arm: the first experiment solid, the second dashed, each in its own colour."""
    looks = styles(common_arms(first, second), control_of(first, second))
    columns = min(3, len(looks))
    rows = -(-len(looks) // columns)
    height = 0.9 + 1.4 * rows + 0.42 * (rows - 1)
    figure, grid = axes_row(TWO_COLUMNS, height, columns, rows=rows, gap=0.5, row_gap=0.42, left=0.72, top=0.45)
    curves = {
        arm: [smoothed_band(experiment, arm, column, experiment.smoothing).measured() for experiment in (first, second)]
        for arm in looks
    }
    for axes, (arm, look) in zip(grid.flat, looks.items(), strict=False):
        values = np.concatenate([part for band in curves[arm] for part in (band.low, band.high)])
        floor = log_floor(values) if log else -np.inf
        if log:
            log_axis(axes.yaxis, floor, values)
        else:
            padded_limits(axes, values)
        for band, (style, colour), width in zip(curves[arm], STYLES, (1.3, 1.1), strict=True):
            axes.plot(band.steps, np.maximum(band.mean, floor), color=colour, linestyle=style, linewidth=width)
            if band.seeds > 1:
                low, high = np.maximum(band.low, floor), np.maximum(band.high, floor)
                axes.fill_between(band.steps, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(look.label, color=readable_on_white(look.colour), loc="left", fontweight="bold", pad=3.0)
    for axes in grid.flat[len(looks) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], color=colour, linestyle=style, linewidth=1.2, label=name)
        for (style, colour), name in zip(STYLES, names(first, second), strict=True)
    ]
    figure.legend(handles=handles, loc="upper right", ncols=2, frameon=False, borderpad=0.2)
    figure.supxlabel(STEP_LABEL, fontsize=FONT, y=0.02, va="bottom")
    figure.supylabel(label, fontsize=FONT, x=0.01, ha="left")
    return figure


def _config(experiment: Experiment, arm: str) -> dict[str, Any]:
    identity = experiment.of(arm)[0].identity
    inputs = {
        name: identity[name] for name in ("dataset_manifest_sha256", "model_manifest_sha256", "quantised_config_sha256")
    }
    return {name: value for name, value in identity["config"].items() if name != "experiment"} | inputs


def _cell(column: str, value: float) -> str:
    if np.isnan(value):
        return "–"
    if column == "reward_share_kept":
        return percent(value)
    return scientific(value) if column == "k3_kl_final" else f"{value:.3f}"
