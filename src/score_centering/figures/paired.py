"""Differences between runs that met the same problems at each step.

What a step's reward owes to its problems is the same in both and drops out of the difference. Errors: over several
seeds those of the seeds' mean differences; with one seed those of its last steps' differences, taken as independent:
they hold the noise of sampling and leave out what another seed would have changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from score_centering.figures.experiment import Experiment, Run
from score_centering.figures.series import WINDOW

# Student's t: the 97.5th and the 80th percentile for 1, 2, … 30 degrees of freedom (the last one beyond)
T_97_5 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
T_80 = (
    1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879, 0.876, 0.873, 0.870, 0.868, 0.866,
    0.865, 0.863, 0.862, 0.861, 0.860, 0.859, 0.858, 0.858, 0.857, 0.856, 0.856, 0.855, 0.855, 0.854, 0.854,
)  # fmt: skip
Z_97_5 = 1.959964


@dataclass(frozen=True)
class Paired:
    """Mean reward of the last common steps: one arm's less another's."""

    difference: float
    error: float  # standard error of the mean of the paired differences
    unpaired_error: float  # what it would be if the two had nothing in common
    values: int  # differences that the errors come from: seeds, or steps of one seed
    seeds: int
    last_step: int  # of the steps that both have; the smallest over seeds

    @property
    def half_width(self) -> float:
        """Of the 95 % interval around `difference`, by Student's t."""
        return _quantile(T_97_5, self.values) * self.error

    @property
    def detectable(self) -> float:
        """The difference that such a comparison finds with a probability of 80 % at the 5 % level (two-sided)."""
        return (_quantile(T_97_5, self.values) + _quantile(T_80, self.values)) * self.error


def paired(first: Sequence[Run], second: Sequence[Run], window: int = WINDOW) -> Paired | None:
    """`second` less `first` over the last `window` steps that both have, seed by seed.

    None where no seed is in both, or where fewer than two differences are left.  Errors: none; NaN steps are left out.
    """
    others = {run.seed: run for run in second}
    lasts, pairs = [], []
    for run in first:
        if run.seed in others and _same_problems(run, others[run.seed]):
            steps, here, there = np.intersect1d(run.steps, others[run.seed].steps, return_indices=True)
            rewards = run.metrics["reward_mean"][here], others[run.seed].metrics["reward_mean"][there]
            measured = ~np.isnan(rewards[0] + rewards[1])
            if measured.any():
                pairs.append(np.stack([reward[measured][-window:] for reward in rewards]))
                lasts.append(int(steps[measured][-1]))
    table = np.array([pair.mean(axis=1) for pair in pairs]).T if len(pairs) > 1 else pairs[0] if pairs else None
    if table is None or table.shape[1] < 2:
        return None
    change, count = table[1] - table[0], table.shape[1]
    spread = table.std(axis=1, ddof=1) / sqrt(count)
    return Paired(
        float(change.mean()),
        float(change.std(ddof=1) / sqrt(count)),
        float(np.hypot(*spread)),
        count,
        len(pairs),
        min(lasts),
    )


def uncorrected(experiment: Experiment) -> str | None:
    """The arm, other than the control, whose settings neither centre nor weight; None where none was run."""
    for arm in experiment.arms:
        correction = experiment.of(arm)[0].identity["config"]["score_centering"]
        if arm != experiment.control and not correction["centering"] and correction["is_mode"] == "none":
            return arm
    return None


def binomial_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a probability of which `share` of `count` independent trials succeeded."""
    centre, z2 = share + Z_97_5**2 / (2 * count), Z_97_5**2
    width = Z_97_5 * sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (centre - width) / (1 + z2 / count), (centre + width) / (1 + z2 / count)


def power(found: Sequence[Paired]) -> str:
    """How large a difference these comparisons could have shown, in one sentence."""
    sizes = [pair.detectable for pair in found]
    span = f"{min(sizes):.3f}" if len(sizes) == 1 else f"{min(sizes):.3f} to {max(sizes):.3f}, by arm,"
    kind = "over seeds" if found[0].seeds > 1 else "of sampling alone, with one seed and its steps taken as independent"
    return (
        f"Power: differences of {span} would have been found with a probability of 80 % at the 5 % level; smaller ones "
        f"can't be told from none here. Errors are those {kind}."
    )


def _same_problems(first: Run, second: Run) -> bool:
    """Whether both, of one seed, meet the same problems at each step: one data set and one size of batch."""
    return _order(first.identity) == _order(second.identity)


def _order(identity: dict[str, Any]) -> tuple[Any, ...]:
    config = identity["config"]
    return identity["dataset_manifest_sha256"], config["data"]["train_batch_size"]


def _quantile(table: Sequence[float], values: int) -> float:
    return table[min(values - 1, len(table)) - 1]
