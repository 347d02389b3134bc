"""From the first updates of runs to which of them will be lost: a logistic regression and how well it tells.

Fitted on the runs of half of the cells and tested on those of the others, because runs of one cell are alike.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RIDGE = 1.0
NEWTON_STEPS = 50


@dataclass(frozen=True)
class Law:
    """fitted, other: area under the ROC curve on the half of the cells that it was fitted on, and on the others; NaN
    where a half has no run of either kind.  fitted_runs, other_runs: their numbers of runs.  weights: of each feature's
    logarithm, in units of its standard deviation over the fitted half; positive: more of it, more runs lost."""

    fitted: float
    other: float
    fitted_runs: int
    other_runs: int
    weights: dict[str, float]


def area(score: np.ndarray, target: np.ndarray) -> float:
    """Chance that a run that is lost scores above one that is not, ties counting half: the area under the ROC curve.

    score: (N,); target: (N,) 1 for a run that is lost, else 0. NaN without a run of either kind.
    """
    above = score[target == 1][:, None] - score[target == 0][None]
    return float(((above > 0) + 0.5 * (above == 0)).mean()) if above.size else float("nan")


def half_of(cell: str) -> bool:
    """Whether runs of this cell are fitted on: by the CRC of its name, so a run's half never depends on other runs."""
    return zlib.crc32(cell.encode()) % 2 == 0


def law(inputs: np.ndarray, target: np.ndarray, cells: Sequence[str], features: Sequence[str]) -> Law:
    """The regression of `target` on the logarithms of `inputs`, ridge 1 on standardised features, none on the constant.

    Args:
        inputs: (N, F) without NaN; values below 1e-8 count as 1e-8.
        target: (N,) 1 for a run that is lost, else 0.
        cells: (N,) names of the runs' cells.
        features: (F,) what the inputs are called.

    Raises:
        ValueError: no run is in the fitted half.
    """
    fitted = np.array([half_of(cell) for cell in cells], bool)
    if not fitted.any():
        raise ValueError("law: no cell is in the half that it is fitted on")
    logs = np.log(np.maximum(inputs, 1e-8))
    mean, deviation = logs[fitted].mean(axis=0), logs[fitted].std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(logs)), (logs - mean) / deviation])
    weights = _fit(design[fitted], target[fitted])
    score = design @ weights
    areas = [area(score[half], target[half]) for half in (fitted, ~fitted)]
    named = {name: float(weight) for name, weight in zip(features, weights[1:], strict=True)}
    return Law(*areas, int(fitted.sum()), int((~fitted).sum()), named)


def _fit(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Newton's method on the penalised likelihood; design (N, 1 + F), its first column ones."""
    weights, ridge = np.zeros(design.shape[1]), RIDGE * np.eye(design.shape[1])
    ridge[0, 0] = 1e-6
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-design @ weights))
        slope = design.T @ (target - chance) - ridge @ weights
        curvature = (design.T * (chance * (1 - chance))) @ design + ridge
        weights += np.linalg.solve(curvature, slope)
    return weights
