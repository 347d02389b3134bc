"""The decision tree of docs/mismatch.md over one log: a verdict, its evidence, and what to do next."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from score_centering.diagnosis.changes import Course, changes, course, finite
from score_centering.diagnosis.columns import QUANTITIES
from score_centering.diagnosis.readers import Log, Series
from score_centering.diagnosis.signatures import FLOOR, signatures

VERDICTS = ("bug", "sampler_broken", "harmless", "drift", "off_policy", "tail", "instability", "cannot_tell")
Verdict = Literal["bug", "sampler_broken", "harmless", "drift", "off_policy", "tail", "instability", "cannot_tell"]
CORRECTIONS = ("unknown", "none", "centering", "weights", "both")

MIN_ROWS = 5
SAFE_SEQUENCE_KL = 0.05  # nats a response: K3 times its length, below which no run of ours lost anything to drift
WEIGHED_SEQUENCE_KL = 0.3  # the same for an objective with bounded importance weights, which leave a part of the drift
UNKNOWN_LENGTH = 1000.0  # tokens, where a log has no length: then only a very small K3 is called safe
GROWTH = 3.0  # K3 against its level in the healthy part
MIN_RESETS = 3
STALE_GROWTH = 10.0  # K3 of a sampler that ages, against K3 of its first step
BROKEN = 0.6  # sampled over clean reward
TAIL_INDEX = 40.0  # K3 over that of a Gaussian gap of the same mean |d|
TAIL_CHI2 = 10.0  # χ² over K3: 2 for a small Gaussian gap


@dataclass(frozen=True)
class Diagnosis:
    verdict: Verdict
    confidence: float  # 0 … 1
    evidence: list[str]
    advice: list[str]
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mismatch:
    """Levels of K3 over a log; medians, in nats a token."""

    first: float  # of the first rows
    early: float  # upper quartile of the rows 2 … a tenth, in which an ageing sampler shows
    resets: int  # times that it fell from 100 times its first level to 3 times: the sampler was refreshed
    healthy: float  # while the reward was
    late: float  # of the last fifth
    highest: float
    length: float | None  # tokens a response, while healthy
    estimated: bool  # from mean |d|, for want of K3

    @property
    def sequence(self) -> float:
        """Nats a response while healthy."""
        return self.healthy * (self.length or UNKNOWN_LENGTH)


def diagnose(log: Log, corrections: str = "unknown") -> Diagnosis:
    """What the log says of its run.

    Args:
        corrections: what the objective does about the mismatch, one of `CORRECTIONS`; "unknown": as the log tells.
    """
    reward = log.get("reward")
    rows = len(reward.values) if reward is not None else 0
    path = course(reward) if reward is not None else None
    level = mismatch(log, path)
    active = corrections if corrections != "unknown" else _corrections(log)
    measures = _measures(path, level)
    order = [
        f"{change.quantity} {'rises' if change.after > change.before else 'falls'} at step {change.step} "
        f"({change.before:.3g} → {change.after:.3g})"
        for change in changes(log)
    ]
    history = [f"in order: {'; '.join(order)}"] if order else []

    broken = signatures(log)
    if broken:
        best = broken[0]
        return Diagnosis(
            "bug",
            best.confidence,
            [f"{best.cause}: {best.evidence}", *(f"also {other.cause}: {other.evidence}" for other in broken[1:])],
            [best.advice],
            measures,
        )
    if rows < MIN_ROWS or path is None:
        return _cannot_tell(log, [f"{rows} steps with a reward; {MIN_ROWS} are needed"], measures)
    assert reward is not None
    facts = [_reward_fact(path, reward), *_level_facts(level, active), *_still_facts(log), *_other_facts(log), *history]
    sampler = _sampler_broken(log, path)
    if sampler is not None:
        return Diagnosis(
            "sampler_broken",
            sampler[0],
            [sampler[1], *facts],
            [
                "The weights are fine and their low-precision copy is not: validate the checkpoint against BF16 "
                "(greedy agreement, K3, equal tokens twice), then take a finer format for cache or layers.",
                "Corrections of the objective can't give the sampler its quality back.",
            ],
            measures,
        )
    if level is None:
        return _cannot_tell(log, facts, measures)
    stale = _stale(log, level)
    tail = _tail(log)
    if path.lost:
        return _lost(log, path, level, active, stale, tail, facts, measures)
    return _alive(log, path, level, active, stale, tail, facts, measures)


def mismatch(log: Log, path: Course | None) -> Mismatch | None:
    """Levels of K3; of an estimate from mean |d| (Gaussian: π/4·m²) where K3 is not logged."""
    estimated = "k3_kl" not in log.series
    source = log.get("abs_gap" if estimated else "k3_kl")
    if source is None:
        return None
    series = finite(source)
    values = np.pi / 4 * series.values**2 if estimated else series.values
    n = len(values)
    if n == 0:
        return None
    end = path.fell_at if path is not None and path.fell_at is not None else series.steps[-1]
    alive = values[series.steps <= end] if (series.steps <= end).any() else values[:1]
    early = values[1 : max(4, n // 10)]
    length = log.get("length")
    lengths = finite(length).until(float(end)).values if length is not None else np.empty(0)
    return Mismatch(
        first=float(values[0]),
        early=float(np.quantile(early, 0.75)) if len(early) else float(values[0]),
        resets=int(np.sum((values[1:] < 3 * values[0]) & (values[:-1] > 100 * values[0]))),
        healthy=float(np.median(alive)),
        late=float(np.median(values[-max(1, n // 5) :])),
        highest=float(values.max()),
        length=float(np.median(lengths)) if len(lengths) else None,
        estimated=estimated,
    )


def _lost(
    log: Log,
    path: Course,
    level: Mismatch,
    active: str,
    stale: str | None,
    tail: str | None,
    facts: list[str],
    measures: dict[str, float],
) -> Diagnosis:
    at_fall = _around(log, path.fell_at)
    grown = at_fall / max(level.healthy, 1e-12)
    rise = f"K3 is {at_fall:.2g} where the reward falls, {grown:.1f} times its level before"
    if stale is not None:
        missing = {"none": "TIS or MIS", "centering": "TIS or MIS", "weights": "centering", "both": "a younger sampler"}
        return Diagnosis(
            "off_policy",
            0.85,
            [stale, *facts],
            [f"Add {missing.get(active, 'TIS or MIS, composed with centering')}: importance weights carry an old "
             "sampler's rollouts to the new weights, and centering removes the drift that they leave.",
             "Refresh the sampler more often, or lower the rate: the mismatch grows with both."],
            measures,
        )  # fmt: skip
    if level.highest < FLOOR or (level.sequence < SAFE_SEQUENCE_KL and grown < GROWTH):
        return Diagnosis(
            "instability",
            0.9 if level.highest < FLOOR else 0.75,
            [f"the reward is lost, and no mismatch comes before it: {rise}", *facts],
            ["Lower the learning rate, raise the rollouts a step, or bound the step (gradient clip, PPO clip, AdamW): "
             "a BF16 control with the same settings will lose its reward too."],
            measures,
        )  # fmt: skip
    if active in ("centering", "both"):
        return Diagnosis(
            "instability",
            0.6,
            [f"the objective is centred, so drift is removed; {rise}", *facts],
            ["Lower the rate or bound the step; compare with a BF16 control of the same settings."],
            measures,
        )
    if tail is not None:
        return Diagnosis("tail", 0.7, [tail, rise, *facts], [MASKS], measures)
    sure = 0.85 if grown >= GROWTH or level.sequence >= 1 else 0.65
    return Diagnosis(
        "drift",
        sure,
        [f"the mismatch is there from the first step ({level.first:.2g}) and {rise}", *facts],
        ["Centre the score (arm `sc`): the mismatch has a direction that compounds; centering removes just that.",
         "If the objective can't record a head, weights or masks (TIS, MIS) soften it; a finer sampler removes it."],
        measures,
    )  # fmt: skip


def _alive(
    log: Log,
    path: Course,
    level: Mismatch,
    active: str,
    stale: str | None,
    tail: str | None,
    facts: list[str],
    measures: dict[str, float],
) -> Diagnosis:
    centred, weighted = active in ("centering", "both"), active in ("weights", "both")
    if stale is not None and level.highest * (level.length or UNKNOWN_LENGTH) > SAFE_SEQUENCE_KL and active != "both":
        return Diagnosis(
            "off_policy",
            0.7,
            [stale, *facts],
            ["Weigh the tokens (TIS, MIS), composed with centering, before the mismatch of an ageing sampler costs the "
             "reward; or refresh it more often."],
            measures,
        )  # fmt: skip
    if tail is not None and level.sequence > SAFE_SEQUENCE_KL:
        return Diagnosis("tail", 0.6, [tail, *facts], [MASKS], measures)
    if level.sequence < SAFE_SEQUENCE_KL:
        if path.dipped or path.sunk:
            return _cannot_tell(
                log, ["the mismatch is small, but the reward fell in between: watch the rate, not the sampler", *facts],
                measures,
            )  # fmt: skip
        return Diagnosis("harmless", 0.9 if level.highest < FLOOR else 0.8, facts, [KEEP], measures)
    growing = level.late > GROWTH * level.healthy or level.late > GROWTH * max(level.first, 1e-12)
    if growing and path.sunk and not centred:
        return Diagnosis(
            "drift",
            0.6,
            [f"K3 grows ({level.healthy:.2g} → {level.late:.2g}) while the reward falls", *facts],
            ["Centre the score (arm `sc`) now: what is seen is the beginning of a loss."],
            measures,
        )
    corrected = centred or (weighted and level.sequence < WEIGHED_SEQUENCE_KL)
    if corrected and not growing and not path.dipped and not path.sunk:
        return Diagnosis(
            "harmless",
            0.7,
            [f"the mismatch is large, and the objective corrects it ({active})", *facts],
            [KEEP],
            measures,
        )
    return _cannot_tell(
        log,
        [f"K3 × length is {level.sequence:.2g} nats a response, enough to do harm, and none is seen yet", *facts],
        measures,
    )


MASKS = (
    "Mask what lies far out (MIS, or a veto on tokens with p/q below 1e-4), and look at the tokens themselves: "
    "`--rollouts` tells where they stand. A rate that comes and goes points to a fault of the cache, not to rounding."
)
KEEP = "Nothing to correct. Keep K3, entropy, length and truncation in the log."


def _cannot_tell(log: Log, evidence: list[str], measures: dict[str, float]) -> Diagnosis:
    wanted = [name for name in ("reward", "k3_kl", "k1_kl", "clean_reward", "length", "entropy", "sampler_age",
                                "learning_rate") if name not in log.series]  # fmt: skip
    advice = [f"Log {name} ({QUANTITIES[name]})." for name in wanted]
    advice.append("A BF16 control with the same settings tells instability from drift; `--rollouts` tells bugs.")
    return Diagnosis("cannot_tell", 0.0, evidence, advice, measures)


def _corrections(log: Log) -> str:
    """As the run's own settings tell, else what the columns show: weights that are not all 1, or mask tokens."""
    if log.corrections != "unknown":
        return log.corrections
    weights, masked = log.get("weight_mean"), log.get("masked_share")
    weighted = weights is not None and bool(np.any(np.abs(finite(weights).values - 1) > 1e-9))
    weighted = weighted or (masked is not None and bool(np.any(finite(masked).values > 0)))
    return "weights" if weighted else "unknown"


def _sampler_broken(log: Log, path: Course) -> tuple[float, str] | None:
    """The clean reward lives and the sampled one does not: at the same steps, in the last of them."""
    clean, reward = log.get("clean_reward"), log.get("reward")
    if clean is None or reward is None:
        return None
    clean = finite(clean)
    if len(clean.values) == 0:
        return None
    recent = clean.steps >= clean.steps[-1] - (clean.steps[-1] - clean.steps[0]) / 3
    level = float(np.median(clean.values[recent]))
    kept = level > 0.6 * float(clean.values.max())
    steps = clean.steps[recent]
    span = max(1, int(log.last_step) // 20)
    near = np.abs(reward.steps[:, None] - steps[None, :]).min(axis=1) <= span
    sampled = float(np.nanmean(reward.values[near])) if near.any() else path.last
    if not kept or level < 0.05 or sampled > BROKEN * level:
        return None
    return (
        0.9 if sampled < 0.4 * level else 0.7,
        f"the trained weights earn {level:.2g} in their own precision, the sampler's copy only {sampled:.2g}",
    )


def _stale(log: Log, level: Mismatch) -> str | None:
    age = log.get("sampler_age")
    if age is not None:
        oldest = float(np.nanmax(age.values))
        if oldest < 1.5:
            return None
        return (
            f"the sampler is up to {oldest:.0f} updates old, and K3 goes from {level.first:.2g} to {level.highest:.2g}"
        )
    grown = level.early > STALE_GROWTH * level.first and level.early > 10 * FLOOR
    if level.first < 3 * FLOOR and (grown or level.resets >= MIN_RESETS):
        return (
            f"K3 is {level.first:.2g} in the first step, when both sides hold the same weights, and up to "
            f"{level.highest:.2g} later, falling back {level.resets} times: the sampler ages"
        )
    return None


def _tail(log: Log) -> str | None:
    """Few tokens carry the mismatch: K3 far above that of a Gaussian gap with the same mean |d|, or χ² far above K3."""
    k3, gap, chi2 = log.get("k3_kl"), log.get("abs_gap"), log.get("chi2")
    if k3 is None:
        return None
    level = float(np.median(finite(k3).values))
    k1 = log.get("k1_kl")
    if k1 is not None and float(np.median(finite(k1).values)) < 0.2 * level:
        return None  # tokens that were drawn from q have K1 near K3, in a tail too: this is no honest tail
    if gap is not None:
        index = level / max(np.pi / 4 * float(np.median(finite(gap).values)) ** 2, 1e-12)
        if index > TAIL_INDEX:
            return f"few tokens carry the mismatch: K3 is {index:.0f} times that of a Gaussian gap of the same mean |d|"
    if chi2 is not None and level > FLOOR:
        ratio = float(np.median(finite(chi2).values)) / level
        if ratio > TAIL_CHI2:
            return f"few tokens carry the mismatch: χ² is {ratio:.0f} times K3, where a Gaussian gap gives 2"
    return None


def _around(log: Log, step: int | None) -> float:
    """Median K3 of the tenth of the run that follows `step`."""
    name = "k3_kl" if "k3_kl" in log.series else "abs_gap"
    series = finite(log.series[name])
    values = series.values if name == "k3_kl" else np.pi / 4 * series.values**2
    if step is None:
        return float(np.median(values))
    after = values[series.steps > step][: max(3, len(values) // 10)]
    return float(np.median(after)) if len(after) else float(values[-1])


def _reward_fact(path: Course, reward: Series) -> str:
    base = (
        f"reward {path.start:.2g} at the start, at best {path.peak:.2g} (step {path.peak_step}), last {path.last:.2g}"
    )
    if path.lost:
        return f"{base}: lost after step {path.fell_at}"
    return f"{base}{': it fell below half in between' if path.dipped else ''}, over {len(reward.values)} logged steps"


def _level_facts(level: Mismatch | None, active: str) -> list[str]:
    if level is None:
        return ["no mismatch is logged"]
    length = (
        f"{level.length:.0f} tokens" if level.length else f"a length that is not logged ({UNKNOWN_LENGTH:.0f} taken)"
    )
    source = " (estimated from mean |d|)" if level.estimated else ""
    return [
        f"K3 {level.first:.2g} at first, {level.healthy:.2g} while healthy, {level.late:.2g} at last{source}; times "
        f"{length}: {level.sequence:.2g} nats a response",
        f"corrections in the objective: {active}",
    ]


FACTS = {  # logged quantities that a verdict does not turn on, but its reader wants: name, words, from which value on
    "ess": ("effective sample size at its lowest", min, None),
    "ratio_max": ("largest p/q of a token", max, 2.0),
    "abs_gap_max": ("largest |d| of a token", max, 1.0),
    "weight_mean": ("mean importance weight at its lowest", min, None),
    "drift_share": ("drift over the gradient, at its largest", max, None),
    "drift_coherence": ("coherence of the drift at last (1: a bias, 1/√n: noise)", None, None),
    "nonfinite": ("updates skipped as not finite in one step", max, 0.5),
    "val_reward": ("validation reward at last", None, None),
}


def _still_facts(log: Log) -> list[str]:
    """K3 before anything was trained: none of it comes from the sampler's age."""
    rate, k3 = log.get("learning_rate"), log.get("k3_kl")
    if rate is None or k3 is None:
        return []
    values = finite(k3).values[np.isin(finite(k3).steps, rate.steps[rate.values == 0])]
    if not len(values):
        return []
    return [f"K3 is {np.median(values):.2g} at learning rate 0: that much is precision or a bug, not the sampler's age"]


def _other_facts(log: Log) -> list[str]:
    facts = []
    for name, (words, pick, bound) in FACTS.items():
        series = log.get(name)
        values = finite(series).values if series is not None else np.empty(0)
        if len(values):
            value = float(pick(values) if pick else values[-1])
            if bound is None or value >= bound:
                facts.append(f"{words}: {value:.3g}")
    return facts


def _measures(path: Course | None, level: Mismatch | None) -> dict[str, float]:
    result: dict[str, float] = {}
    if path is not None:
        result |= {"reward_start": path.start, "reward_peak": path.peak, "reward_last": path.last}
        if path.fell_at is not None:
            result["reward_fell_at"] = float(path.fell_at)
    if level is not None:
        result |= {"k3_first": level.first, "k3_healthy": level.healthy, "k3_late": level.late}
        result["k3_sequence"] = level.sequence
    return result
