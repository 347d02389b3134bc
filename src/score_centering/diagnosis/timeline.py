"""What changed first? The watched quantities of one log, one below another, with their change points in order."""

import numpy as np
from matplotlib.figure import Figure

from score_centering.diagnosis.changes import LOGARITHMIC, WATCHED, changes, finite
from score_centering.diagnosis.readers import Log
from score_centering.figures.canvas import TWO_COLUMNS, axes_row

LABELS = {
    "reward": "reward",
    "k3_kl": "K3, nats/token",
    "entropy": "entropy, nats",
    "length": "tokens",
    "truncated": "truncated",
    "grad_norm": "gradient norm",
}
INK, MARK = "#4d4d4d", "#c1272d"
ROW = 0.85  # inches


def timeline(log: Log) -> Figure:
    """One panel a quantity that is logged, over the same steps; a numbered line where it changes."""
    shown = [name for name in WATCHED if name in log.series]
    figure, axes = axes_row(
        TWO_COLUMNS, 0.5 + ROW * len(shown), 1, rows=len(shown), left=0.85, row_gap=0.14, sharex=True
    )
    rank = {change.quantity: (number, change) for number, change in enumerate(changes(log), 1)}
    for axis, name in zip(axes[:, 0], shown, strict=True):
        series = finite(log.series[name])
        axis.plot(series.steps, series.values, color=INK, linewidth=0.9)
        if name in LOGARITHMIC and np.any(series.values > 0):
            axis.set_yscale("log")
        axis.set_ylabel(LABELS[name])
        if name in rank:
            number, change = rank[name]
            axis.axvline(change.step, color=MARK, linewidth=0.9)
            axis.annotate(
                f" {number}: step {change.step}",
                (change.step, 0.96),
                xycoords=("data", "axes fraction"),
                color=MARK,
                va="top",
            )
    axes[-1, 0].set_xlabel("step")
    return figure
