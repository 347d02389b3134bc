"""What an experiment showed, in sentences computed from its numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from score_centering.figures.experiment import Experiment, Run
from score_centering.figures.numerals import percent, scientific
from score_centering.figures.series import WINDOW
from score_centering.figures.summary import COLLAPSED_BELOW, summarise_run
from score_centering.precision.registry import Precision

HELD_ABOVE = 0.9  # share of the peak kept at the end
LOST_BELOW = 0.5


@dataclass(frozen=True)
class Outcome:
    """One arm over its seeds: means, and standard errors of the mean reward of the first and last steps."""

    label: str
    first: float
    last: float
    first_error: float
    last_error: float
    share_kept: float
    collapse_step: int | None  # the earliest over seeds
    k3_final: float
    precision: str  # of its rollouts

    @property
    def rising(self) -> bool:
        """The last steps are the highest, above the first by more than noise: what is kept of the peak says nothing."""
        return self.share_kept == 1.0 and clearly_above(self.last, self.first, self.last_error, self.first_error)

    @property
    def fate(self) -> str:
        if self.collapse_step is not None or self.share_kept < LOST_BELOW:
            return "collapsed"
        return "held" if self.share_kept >= HELD_ABOVE else "faded"


@dataclass(frozen=True)
class Verdict:
    headline: str
    notes: tuple[str, ...]


def outcome(label: str, runs: Sequence[Run]) -> Outcome:
    """Over several seeds the errors are the spread of the seeds; with one they are that of the ten steps."""
    rows = [summarise_run(run) for run in runs]
    rewards = [run.metrics["reward_mean"][~np.isnan(run.metrics["reward_mean"])] for run in runs]
    means = {name: np.array([row[name] for row in rows], np.float64) for name in ("reward_first", "reward_last")}
    errors = {
        name: standard_error(means[name] if len(runs) > 1 else rewards[0][window])
        for name, window in (("reward_first", slice(WINDOW)), ("reward_last", slice(-WINDOW, None)))
    }
    collapses = [row["collapse_step"] for row in rows if row["collapse_step"] is not None]
    return Outcome(
        label,
        means["reward_first"].mean(),
        means["reward_last"].mean(),
        errors["reward_first"],
        errors["reward_last"],
        np.nan_to_num(np.array([row["reward_share_kept"] for row in rows], np.float64)).mean(),
        min(collapses, default=None),
        np.array([row["k3_kl_final"] for row in rows], np.float64).mean(),
        rollout_precision(runs[0]),
    )


def rollout_precision(run: Run) -> str:
    """What a run's rollouts were computed in, as `Precision.label` says it."""
    rollout = run.identity["config"]["actor_rollout_ref"]["rollout"]
    return Precision(rollout["quantization"], rollout["engine_kwargs"]["vllm"]["kv_cache_dtype"]).label


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean (ddof 1); 0 for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def clearly_above(high: float, low: float, high_error: float, low_error: float) -> bool:
    """More than two standard errors of the difference."""
    return high - low > 2 * np.hypot(high_error, low_error)


def verdict(experiment: Experiment) -> Verdict:
    """One sentence that answers the experiment's question, and notes that qualify it."""
    looks = experiment.looks
    outcomes = {arm: outcome(look.label, experiment.of(arm)) for arm, look in looks.items()}
    control = outcomes.get(experiment.control)
    low = {arm: found for arm, found in outcomes.items() if arm != experiment.control}
    notes = []
    if control:
        learned = clearly_above(control.last, control.first, control.last_error, control.first_error)
        notes.append(
            f"The BF16 control {'learned' if learned else 'did not learn'}: its mean reward went from "
            f"{control.first:.2f} over the first {WINDOW} steps to {control.last:.2f} over the last {WINDOW}."
        )
        if not learned:
            return Verdict(
                "No verdict: the BF16 control itself did not learn, so nothing here can be put down to the precision "
                "of the rollouts.",
                tuple(notes + _qualifications(experiment, outcomes)),
            )
    if not low:
        return Verdict("No verdict: only the BF16 control was run.", tuple(notes))
    return Verdict(_fates(low), (_ranking(low), *notes, *_qualifications(experiment, outcomes)))


def _fates(low: Mapping[str, Outcome]) -> str:
    collapsed, faded, held = ([o for o in low.values() if o.fate == fate] for fate in ("collapsed", "faded", "held"))
    precisions = f"With {join(list(dict.fromkeys(o.precision for o in low.values())))} rollouts"
    rising, level = [o for o in held if o.rising], [o for o in held if not o.rising]
    if not collapsed and not faded:
        return f"{precisions}, no arm collapsed: {join(_kept(rising, level, len(low)))}."
    parts = []
    for verb, group in (("collapsed", collapsed), ("faded", faded)):
        if group:
            parts.append(
                f"{join([f'{o.label} ({percent(o.share_kept)} of its peak reward kept)' for o in group])} {verb}"
            )
    if held:
        parts.append(join(_kept(rising, level, len(low))))
    return f"{precisions}, {join(parts, ', while ' if held else ' and ')}."


def _kept(rising: Sequence[Outcome], level: Sequence[Outcome], arms: int) -> list[str]:
    """What arms that neither collapsed nor faded did, of `arms` in all; a share of the peak is rounded down."""

    def subject(group: Sequence[Outcome]) -> str:
        return f"all {arms} arms" if len(group) == arms > 1 else join([o.label for o in group])

    parts = []
    if rising:
        was = "was" if len(rising) == 1 else "were"
        parts.append(f"{subject(rising)} {was} still rising at the end")
    if level:
        share = percent(math.floor(100 * min(o.share_kept for o in level)) / 100)
        parts.append(f"{subject(level)} kept at least {share} of the peak reward")
    return parts


def _ranking(low: Mapping[str, Outcome]) -> str:
    ranked = sorted(low.values(), key=lambda o: -o.last)
    best = ranked[0]
    level = [o for o in ranked[1:] if not clearly_above(best.last, o.last, best.last_error, o.last_error)]
    if len(ranked) == 1:
        return f"{best.label} ended at a mean reward of {best.last:.2f}."
    if len(level) == len(ranked) - 1:
        return f"All ended level within noise, at mean rewards of {ranked[-1].last:.2f} to {best.last:.2f}."
    within = f", level within noise with {join([o.label for o in level])}" if level else ""
    return f"{best.label} ended highest, at a mean reward of {best.last:.2f}{within}."


def _qualifications(experiment: Experiment, outcomes: Mapping[str, Outcome]) -> list[str]:
    seeds = max(len(experiment.of(arm)) for arm in outcomes)
    error = max(o.last_error for o in outcomes.values())
    notes = []
    k3 = sorted(
        (o for arm, o in outcomes.items() if arm != experiment.control and not np.isnan(o.k3_final)),
        key=lambda o: o.k3_final,
    )
    if k3:
        span = f"{scientific(k3[0].k3_final)} ({k3[0].label})"
        if len(k3) > 1:
            span += f" to {scientific(k3[-1].k3_final)} ({k3[-1].label})"
        note = f"K3 ended at {span} nats per token"
        control = outcomes.get(experiment.control)
        if control and not np.isnan(control.k3_final):
            note += f"; the control's at {scientific(control.k3_final)}"
        notes.append(note + ".")
    notes.append(
        f"Collapsed: below {percent(COLLAPSED_BELOW)} of the peak at some step, or less than {percent(LOST_BELOW)} "
        f"of it kept at the end; faded: less than {percent(HELD_ABOVE)} kept. Peak and end are means of {WINDOW} steps."
    )
    spread = "the spread over seeds" if seeds > 1 else f"the spread of the last {WINDOW} steps of one seed"
    notes.append(
        f"{'One seed' if seeds == 1 else f'{seeds} seeds'} per arm. Noise is two standard errors, from {spread}; "
        f"that of one arm's final reward is at most ±{2 * error:.2f}."
    )
    if seeds == 1:
        notes.append("One seed can't show how often an arm would collapse.")
    return notes


def join(parts: Sequence[str], last: str = " and ") -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + last + parts[-1]
