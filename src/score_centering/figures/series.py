"""Small arithmetic on per-step series: smoothing, and the mean and range over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 10  # steps: the "first" and "last" steps of the summary, and the smoothing that its peak is read from


def trailing_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the current and the up to `window` − 1 values before it: (S,) float64 → (S,) float64.

    NaN marks a value that was not measured: it is left out, and a window without any value gives NaN.
    """
    if window < 1:
        raise ValueError(f"window: {window} steps; allowed are 1 and more")
    padded = np.concatenate([np.full(window - 1, np.nan), np.asarray(values, np.float64)])
    if len(padded) < window:
        return np.empty(0)
    return mean_of_measured(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def mean_of_measured(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Mean along `axis` over the values that are not NaN; NaN where there is none. float64."""
    measured = ~np.isnan(values)
    count = measured.sum(axis=axis)
    total = np.where(measured, values, 0.0).sum(axis=axis)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


@dataclass(frozen=True)
class Band:
    """One quantity of one arm over its seeds. All arrays (S,) float64, NaN where no seed measured it."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray  # smallest over seeds
    high: np.ndarray  # largest over seeds
    seeds: int

    def measured(self) -> "Band":
        """Without the steps at which nothing was measured."""
        keep = ~np.isnan(self.mean)
        return Band(self.steps[keep], self.mean[keep], self.low[keep], self.high[keep], self.seeds)


def across_seeds(series: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """Mean and range over seeds at each step that any seed has. `series`: one (steps (S,), values (S,)) per seed."""
    steps = np.unique(np.concatenate([own_steps for own_steps, _ in series]))
    table = np.full((len(series), len(steps)), np.nan)
    for row, (own_steps, values) in zip(table, series, strict=True):
        row[np.searchsorted(steps, own_steps)] = values
    missing = np.isnan(table)
    nothing = missing.all(axis=0)
    low = np.where(missing, np.inf, table).min(axis=0)
    high = np.where(missing, -np.inf, table).max(axis=0)
    return Band(
        steps, mean_of_measured(table), np.where(nothing, np.nan, low), np.where(nothing, np.nan, high), len(series)
    )


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
    """Positions moved as little as possible (least squares) so that neighbours are at least `gap` apart in [low, high].

    The order is kept. With y_i = z_i + i·gap the constraint is that z does not fall, which isotonic regression (pool
    adjacent violators) solves; bounds on z are then a clip. When they cannot all fit, the gap shrinks until they do.
    """
    order = np.argsort(np.asarray(positions, np.float64), kind="stable")
    count = len(order)
    if count == 0:
        return np.empty(0)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    ranks = np.arange(count)
    blocks: list[list[float]] = []  # [mean, size]
    for value in np.asarray(positions, np.float64)[order] - gap * ranks:
        blocks.append([float(value), 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, size = blocks.pop()
            blocks[-1][0] = (blocks[-1][0] * blocks[-1][1] + mean * size) / (blocks[-1][1] + size)
            blocks[-1][1] += size
    pooled = np.concatenate([np.full(int(size), mean) for mean, size in blocks])
    result = np.empty(count)
    result[order] = np.clip(pooled, low, high - gap * (count - 1)) + gap * ranks
    return result
