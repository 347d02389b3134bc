"""Signatures of bugs that have a closed form: identities that any honest log satisfies, and what breaks them.

Notation: p is the trainer's distribution, q the one that is recorded as the sampler's, d = log p − log q of a sampled
token, r = exp(d). If the tokens were really drawn from the recorded q, and q > 0 wherever p > 0, then

    E_q[r] = 1,     so     E[K3] = E[K1] = KL(q‖p) ≥ 0,     K3 − K1 = mean r − 1

for every model, precision, length and age of the sampler: given its prefix, each r − 1 has mean 0 (a martingale
difference). A mean that stays away from 1 says that the tokens were not drawn from that q.
"""

from dataclasses import dataclass

import numpy as np

from score_centering.diagnosis.changes import finite, noise
from score_centering.diagnosis.readers import Log, Series

FLOOR = 3e-4  # nats a token: K3 of one BF16 model in two engines, see docs/mismatch.md
MIN_ROWS = 3
SHARPER, FLATTER = (
    2.5,
    5.0,
)  # nats against the entropy over the KL; errors of a sampler make it flatter, up to 4.3 so far


@dataclass(frozen=True)
class Signature:
    """One broken identity."""

    cause: str
    evidence: str
    advice: str
    confidence: float


def signatures(log: Log) -> list[Signature]:
    """Every signature that the log shows, the surest first."""
    tests = (rate_zero, moved_at_rate_zero, ratio_mean, one_sided, temperature, uncorrelated, summed, not_finite)
    found = [signature for test in tests if (signature := test(log)) is not None]
    return sorted(found, key=lambda signature: -signature.confidence)


def rate_zero(log: Log) -> Signature | None:
    rate = log.get("learning_rate")
    if rate is None or len(rate.values) < 5 or np.nanmax(np.abs(rate.values)) > 0:
        return None
    return Signature(
        "learning rate 0",
        f"the learning rate is 0 in all {len(rate.values)} steps: nothing is trained",
        "Set a learning rate, or look for a schedule that never leaves its warm-up.",
        0.98,
    )


def moved_at_rate_zero(log: Log) -> Signature | None:
    """A policy ratio that is not 1, or a growing mismatch, while the learning rate is 0 and no weight can move."""
    rate = log.get("learning_rate")
    if rate is None:
        return None
    still = rate.steps[rate.values == 0]
    if not len(still):
        return None
    for name, what in (("policy_kl", "KL to its own old log-probs"), ("clip_share", "share of clipped ratios")):
        series = log.get(name)
        if series is not None:
            values = np.abs(series.values[np.isin(series.steps, still)])
            if len(values) and np.nanmedian(values) > 1e-4:
                return Signature(
                    "old log-probs of other weights",
                    f"at learning rate 0 the {what} is {np.nanmedian(values):.2g} instead of 0",
                    "The old log-probs and the new ones come from different forwards: other weights, temperature, "
                    "mask, or dropout that is still on.",
                    0.9,
                )
    k3 = log.get("k3_kl")
    values = finite(k3).values[np.isin(finite(k3).steps, still)] if k3 is not None else np.empty(0)
    half = len(values) // 2
    if half >= 3:
        early, late = float(np.median(values[:half])), float(np.median(values[half:]))
        if late > 1e-3 and late > 5 * early:
            return Signature(
                "a sampler that moves while nothing is trained",
                f"K3 goes from {early:.2g} to {late:.2g} at learning rate 0, when no weight can change",
                "Something other than training changes the sampler: a reload of other weights, a cache that fills with "
                "errors, or scales that are calibrated anew.",
                0.85,
            )
    return None


def ratio_mean(log: Log) -> Signature | None:
    """mean r = 1. Above 1, or a negative K1, can't come from rare tokens that were missed; below 1 can, so not used."""
    excess, where = _excess(log)
    k1, gap = log.get("k1_kl"), _median(log, "abs_gap") or 0.0
    if excess is not None and len(excess) >= MIN_ROWS:
        mean, error = _mean_and_error(excess)
        median = float(np.median(excess))  # of a skewed quantity of mean 0 it lies below 0
        positive = float(np.mean(excess > 0))
        steady = mean > 0.02 and mean > 5 * error and positive > 0.8
        # Below 1 in at least half of the steps where it is honest, for few large ratios make up the mean.
        signed = len(excess) >= 8 and positive > 0.9 and median > max(0.02, 0.1 * (_median(log, "k3_kl") or 0.0))
        if steady or signed or (len(excess) >= 5 and median > 0.1 and positive > 0.9):
            level = _median(log, "k1_kl")
            shifted = level is not None and gap > 0.3 and abs(level) < 0.1 * gap
            return Signature(
                "shifted or re-tokenised log-probs" if shifted else "log-probs of another distribution",
                f"the mean of p/q is {1 + median:.3g} (median over steps, {where}); it is 1 for tokens that were drawn "
                "from the recorded log-probs, whatever the precision"
                + (f"; |d| is {gap:.2g} and its mean only {level:.1g}, as of two unrelated rows" if shifted else ""),
                "The recorded log-probs are not those that the tokens were drawn with. In this order: is the mask or "
                "the row shifted by one? were the responses tokenised again? are they log-probs before temperature or "
                "top-p? are they of older weights (re-scored, or from a cache)?",
                0.95 if median > 0.1 else 0.85,
            )
    negative = _mean_and_error(finite(k1).values) if k1 is not None else None
    if negative is not None and len(k1.values) >= MIN_ROWS:
        mean, error = negative
        if mean < -5 * error and mean < -max(0.003, 0.2 * gap):
            return Signature(
                "log-probs of another distribution",
                f"K1 is {mean:.2g} ± {error:.1g}: a KL is never negative. The sampled tokens are likelier under the "
                "trainer than under the distribution that is said to have drawn them",
                "The recorded log-probs are of another distribution than the one sampled from: before temperature, of "
                "older weights, or of another tokenisation.",
                0.9,
            )
    return None


def one_sided(log: Log) -> Signature | None:
    """Top-p or top-k with renormalised log-probs: every q is p over the kept mass, so d < 0 for every token."""
    k1, gap = log.get("k1_kl"), log.get("abs_gap")
    if k1 is None or gap is None:
        return None
    _, a, b = _aligned(k1, gap)
    keep = b > 1e-4
    if keep.sum() < MIN_ROWS:
        return None
    share, level = float(np.median(a[keep] / b[keep])), float(np.median(a[keep]))
    k3 = _median(log, "k3_kl")
    expected = np.exp(-level) - 1 + level  # K3 where every d is −level; a few hard tokens give K3 near K1 instead
    sided = share > 0.85 and (k3 is None or k3 < 4 * expected)
    # With a gap of precision on top not every d is below 0, and still K1 holds the missing mass and K3 does not.
    apart = k3 is not None and share > 0.5 and level > 4 * k3
    if not (sided or apart) or not 3e-3 < level < 0.7:
        return None
    return Signature(
        "top-p or top-k",
        f"K1 is {share:.2f} of the mean of |d|{'' if k3 is None else f' and {level / k3:.0f} times K3'}: log p < log q "
        f"by habit, as if the sampler's log-probs were renormalised over {np.exp(-level):.0%} of the mass",
        "The sampler truncates (top-p, top-k, min-p) and the trainer does not. Sample from the full softmax, or give "
        "the trainer the same truncation.",
        0.9,
    )


def temperature(log: Log) -> Signature | None:
    """q ∝ p^(1/T). Then E_q[−log p] − H(p) ≈ −(1/T − 1)·Var(log p) and KL(q‖p) ≈ (1/T − 1)²/2·Var(log p), so that
    1/T − 1 ≈ −2·KL / (E_q[−log p] − H(p)). A loss of precision moves both terms by the same order instead."""
    nll, entropy, k3 = log.get("trainer_nll"), log.get("entropy"), log.get("k3_kl")
    if nll is None or entropy is None or k3 is None:
        return None
    steps, a, b = _aligned(nll, entropy)
    level = np.interp(steps, k3.steps, k3.values)
    keep = np.isfinite(level) & (level > 3e-3)
    if keep.sum() < MIN_ROWS:
        return None
    excess = (a - b)[keep]
    mean, error = _mean_and_error(excess)
    kl = float(np.median(level[keep]))
    least = SHARPER if mean < 0 else FLATTER
    if abs(mean) < max(5 * error, least * kl) or np.mean(np.sign(excess) == np.sign(mean)) < 0.8:
        return None
    inverse = 1 - 2 * kl / mean
    if not 0.2 < inverse < 5:
        return None
    return Signature(
        "temperature",
        f"the sampled tokens cost the trainer {mean:+.3g} ± {error:.1g} nats against its entropy, {abs(mean) / kl:.1f} "
        f"times the KL: as if the sampler ran at {1 / inverse:.2g} times the trainer's temperature",
        "Divide the trainer's logits by the sampling temperature, and record log-probs after it.",
        0.85,
    )


def uncorrelated(log: Log) -> Signature | None:
    level = _median(log, "correlation", rows=5)
    if level is None or level > 0.5:
        return None
    return Signature(
        "shifted or re-tokenised log-probs",
        f"the two sides' probabilities of the same tokens correlate by {level:.2f} in the first steps; one model in "
        "two engines gives 0.98 and more",
        "Compare one rollout token by token: a mask or row shifted by one, another tokenisation, or weights that were "
        "never loaded.",
        0.9,
    )


def summed(log: Log) -> Signature | None:
    """A token mean of A·log p is at most max |A| times the mean −log p, and max |A| is 2.5 in a group of 8 that is
    divided by its deviation; the gradient of such a mean has a norm of order 1."""
    loss, norm = log.get("loss"), log.get("grad_norm")
    advantage = _median(log, "advantage")
    nats = max(_median(log, "trainer_nll") or 0.0, _median(log, "entropy") or 0.0, 0.2)
    bound = nats * (3.0 if advantage is None else 5 * max(advantage, 0.01))
    if loss is not None and len(loss.values) >= MIN_ROWS:
        level = float(np.nanmedian(np.abs(loss.values[:20])))
        if level > 10 * bound:
            return Signature(
                "sum for mean",
                f"|loss| is {level:.3g} where a mean over tokens can't pass {bound:.2g}",
                "The loss is a sum over tokens or micro-batches instead of a mean: divide by the number of generated "
                "tokens of the whole update.",
                0.85,
            )
    if norm is not None and len(norm.values) >= MIN_ROWS:
        early = float(np.nanmedian(norm.values[:3]))
        if early > 200:
            return Signature(
                "sum for mean",
                f"the gradient norm is {early:.3g} in the very first steps, before anything can have gone wrong",
                "The loss looks like a sum over tokens or micro-batches instead of a mean.",
                0.6,
            )
    return None


def not_finite(log: Log) -> Signature | None:
    for name in ("k3_kl", "abs_gap", "k1_kl"):
        series = log.get(name)
        if series is not None and len(series.values) >= MIN_ROWS and np.mean(~np.isfinite(series.values[:10])) >= 0.5:
            return Signature(
                "log-probs are not finite",
                f"{name} is not a finite number in most of the first steps",
                "One side returns NaN or −inf: look for an unscaled FP8 or INT4 cache, or masked rows that enter the "
                "mean.",
                0.85,
            )
    return None


def _excess(log: Log) -> tuple[np.ndarray | None, str]:
    """mean r − 1 per step: from the ratio itself, else K3 − K1."""
    ratio = log.get("ratio_mean")
    if ratio is not None:
        return finite(ratio).values - 1, "logged"
    k3, k1 = log.get("k3_kl"), log.get("k1_kl")
    if k3 is None or k1 is None:
        return None, ""
    _, a, b = _aligned(k3, k1)
    return a - b, "from K3 − K1"


def _aligned(first: Series, second: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both series at the steps that they share, where both are finite."""
    steps, a, b = np.intersect1d(first.steps, second.steps, assume_unique=True, return_indices=True)
    x, y = first.values[a], second.values[b]
    keep = np.isfinite(x) & np.isfinite(y)
    return steps[keep], x[keep], y[keep]


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error: from the spread, or from the row-to-row noise where that is larger."""
    n = len(values)
    if n < 2:
        return (float(values[0]) if n else 0.0), float("inf")
    spread = max(float(values.std(ddof=1)), noise(values))
    return float(values.mean()), spread / np.sqrt(n)


def _median(log: Log, name: str, rows: int | None = None) -> float | None:
    series = log.get(name)
    values = finite(series).values[:rows] if series is not None else np.empty(0)
    return float(np.median(values)) if len(values) else None
