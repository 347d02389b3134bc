"""The declared rule of the collapse: what the end of a run is called. Rewards are per step, 0 to 1.

*lost*: the mean reward of the last 20 steps is below a quarter of the best the run had, and of where its control ends.
*held*: it is at least 95 % of where the control ends. Anything between is *lowered*. A run is *healthy* that ends at
90 % of its own peak or above, and not at 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from score_centering.figures.series import trailing_mean

WINDOW = 20  # steps
LOST_BELOW = 0.25
HELD_FROM = 0.95
HEALTHY_FROM = 0.9


@dataclass(frozen=True)
class Ending:
    """last: mean reward of the last 20 steps.  peak: the largest mean of 20 steps.  best: the larger of the peak and
    the reward before training, where that was measured."""

    last: float
    peak: float
    best: float


def ending(reward: ArrayLike, start: float = np.nan) -> Ending:
    """Of a run's rewards (S,) in the order of its steps; NaN was not measured. A shorter run is one window.

    start: clean reward of the model before training; NaN: not measured.

    Raises:
        ValueError: no step has a reward.
    """
    values = np.asarray(reward, np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        raise ValueError("ending: no step has a reward")
    window = min(WINDOW, len(values))
    means = trailing_mean(values, window)[window - 1 :]
    return Ending(float(means[-1]), float(means.max()), float(np.nanmax([means.max(), start])))


def lost(last: ArrayLike, best: ArrayLike, control: ArrayLike) -> np.ndarray:
    """Whether each run is lost; (N,) each, or one number for all. NaN in `control` is not lost."""
    return np.asarray((last < LOST_BELOW * best) & (last < LOST_BELOW * control))


def held(last: ArrayLike, control: ArrayLike) -> np.ndarray:
    """Whether each run held what its control has."""
    return np.asarray(last >= HELD_FROM * control)


def healthy(last: ArrayLike, peak: ArrayLike) -> np.ndarray:
    """Whether each run kept what it had at its peak, and has any."""
    return np.asarray((last >= HEALTHY_FROM * peak) & (np.asarray(last) > 0))


def taken_away(
    runs: pd.DataFrame, cases: Mapping[str, pd.Series], arms: Mapping[str, str], gone: pd.Series, word: str
) -> pd.DataFrame:
    """For each case and arm how many runs are gone, and the mean of where they ended; a dash where there is no run.

    Args:
        runs: a row a run, with `arm` and `reward_last`.
        cases: what the case is called → which rows it is, such as every condition, or all but one.
        arms: arm → what it is called.
        gone, word: which rows are dead or lost, and which of the words it is.
    """
    rows = []
    for name, chosen in cases.items():
        own = [runs[chosen & (runs["arm"] == arm)] for arm in arms]
        counts = [f"{gone[part.index].sum()} of {len(part)}" if len(part) else "–" for part in own]
        lasts = [f"{part['reward_last'].mean():.2f}" if len(part) else "–" for part in own]
        rows.append((name, *counts, *lasts))
    labels = arms.values()
    columns = ["condition", *(f"{label} {word}" for label in labels), *(f"{label} ends" for label in labels)]
    return pd.DataFrame(rows, columns=columns)
