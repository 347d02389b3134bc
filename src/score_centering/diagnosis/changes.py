"""When a logged quantity changed, and how a reward went: arithmetic on one noisy series."""

from dataclasses import dataclass

import numpy as np

from score_centering.diagnosis.readers import Log, Series

WATCHED = ("reward", "k3_kl", "entropy", "length", "truncated", "grad_norm")
LOGARITHMIC = ("k3_kl", "grad_norm")
MIN_ROWS = 8
MIN_SEGMENT = 3
SIGNIFICANCE = 6.0  # differences of two means over their standard error; a search over all splits needs more than 3
LOSS = 4.0  # standard errors of a level that the last one must lie below the peak, for a loss
DIP = 6.0  # the same for a dip, whose lowest level is picked from many too


@dataclass(frozen=True)
class Change:
    """The one split into two levels that fits a series best."""

    quantity: str
    step: int  # first step of the second level
    before: float  # medians
    after: float
    significance: float


@dataclass(frozen=True)
class Course:
    """How a reward went. Levels are means over `window` rows."""

    start: float
    peak: float
    peak_step: int
    last: float
    lost: bool  # ended below half of its peak, by more than its noise
    sunk: bool  # ended below three quarters of its peak, by more than its noise
    dipped: bool  # fell below half of its highest level so far, and came back
    fell_at: int | None  # the last step at which it was at half of its peak or above, where lost
    window: int


def noise(values: np.ndarray) -> float:
    """Standard deviation of the row-to-row noise, from the median of |differences|: a trend does not count."""
    steps = np.abs(np.diff(values))
    return float(np.median(steps) / (0.6745 * np.sqrt(2))) if len(steps) else 0.0


def finite(series: Series) -> Series:
    keep = np.isfinite(series.values)
    return Series(series.steps[keep], series.values[keep])


def change(quantity: str, series: Series) -> Change | None:
    """The best split, if its two means differ by `SIGNIFICANCE` standard errors; None for shorter or flatter series."""
    series = finite(series)
    values = series.values
    if quantity in LOGARITHMIC and (values > 0).any():
        values = np.log(np.maximum(values, values[values > 0].min()))  # a dead run's gradient is exactly 0
    n = len(values)
    if n < MIN_ROWS:
        return None
    first = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)  # rows of the first segment
    sums = np.cumsum(values)
    means = sums[first - 1] / first, (sums[-1] - sums[first - 1]) / (n - first)
    gain = first * (n - first) / n * (means[0] - means[1]) ** 2  # what the split takes off the sum of squares
    best = int(gain.argmax())
    split = int(first[best])
    scale = max(noise(values), 1e-9, 1e-3 * float(np.abs(values).max()))
    significance = float(np.sqrt(gain[best]) / scale)
    if significance < SIGNIFICANCE:
        return None
    raw = series.values
    return Change(
        quantity, int(series.steps[split]), float(np.median(raw[:split])), float(np.median(raw[split:])), significance
    )


def changes(log: Log) -> list[Change]:
    """The change of each watched quantity that has one, the earliest first."""
    found = [change(name, log.series[name]) for name in WATCHED if name in log.series]
    return sorted((item for item in found if item is not None), key=lambda item: item.step)


def course(series: Series) -> Course | None:
    """None where there are fewer than 3 rows."""
    series = finite(series)
    values, n = series.values, len(series.values)
    if n < 3:
        return None
    window = int(np.clip(n // 10, 1, 20))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    size = np.minimum(np.arange(1, n + 1), window)
    level = (sums[1:] - sums[np.arange(1, n + 1) - size]) / size
    sigma = noise(values)
    start = float(values[: min(3, window)].mean())
    best = int(level[window - 1 :].argmax()) + window - 1
    peak, peak_row = (float(level[best]), best) if level[best] >= start else (start, 0)
    last = float(level[-1])
    full = level[window - 1 :]  # the first rows have no whole window behind them
    highest = np.maximum(np.maximum.accumulate(full), start)
    deepest = int((full - 0.5 * highest).argmin())
    error = sigma / np.sqrt(window)
    lost, sunk = (bool(last < share * peak and peak - last > LOSS * error) for share in (0.5, 0.75))
    depth = float(highest[deepest] - full[deepest])
    dipped = not lost and full[deepest] < 0.5 * highest[deepest] and depth > DIP * error
    above = np.flatnonzero(level >= 0.5 * peak)
    fell_at = int(series.steps[above[-1]]) if lost and len(above) else None
    return Course(start, peak, int(series.steps[peak_row]), last, lost, sunk, bool(dipped), fell_at, window)
