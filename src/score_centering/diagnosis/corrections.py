"""What each correction of docs/arms.md would keep, cut and bound, before it is switched on. NumPy, float64.

Written apart from `objectives.weights`, which needs torch; a test holds the two together. Ratios: r = p/q of a token;
of a rollout R = Π r and its geometric mean R^(1/L).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from score_centering.diagnosis.tokens import Tokens
from score_centering.settings.training_blocks import ScoreCentering

BOUNDS = {
    name: field.default for name, field in ScoreCentering.model_fields.items() if isinstance(field.default, float)
}
ICEPOP = 2.0  # β of the arm sc_icepop
NEEDS_ADVANTAGES = ("dppo_tv", "opsm", "gspo")


@dataclass(frozen=True)
class Effect:
    """What one correction would do to these tokens."""

    correction: str  # `score_centering.is_mode`
    bounds: str
    masked: float  # share of tokens of weight 0
    bounded: float  # share of tokens, not masked, whose weight differs from the ratio it is made of
    masked_rollouts: float  # share of rollouts with a token of weight 0
    effective: float  # (Σw)²/(N·Σw²), over tokens


def effects(tokens: Tokens) -> list[Effect]:
    """Each correction on the tokens; those that look at advantages only where these are recorded."""
    found = []
    for name, (describe, weigh) in RULES.items():
        if name in NEEDS_ADVANTAGES and tokens.advantage is None:
            continue
        weights, ratio = weigh(tokens)
        masked = weights == 0
        bounded = ~masked & (np.abs(weights - ratio) > 1e-9 * np.maximum(ratio, 1.0))
        squares = float((weights**2).sum())
        found.append(
            Effect(
                name,
                describe.format(**BOUNDS, **BANDS),
                float(masked.mean()),
                float(bounded.mean()),
                float((np.bincount(tokens.rollout, masked) > 0).mean()),
                float(weights.sum() ** 2 / (len(weights) * squares)) if squares else 0.0,
            )
        )
    return found


def _band_of(name: str) -> tuple[float, float]:
    return BOUNDS[f"{name}_min"], BOUNDS[f"{name}_max"]


Weighed = tuple[np.ndarray, np.ndarray]  # weights of the tokens, and the ratios that they are made of


def _in_band(ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    return (ratio >= low) & (ratio <= high)


def _rollout_ratio(tokens: Tokens, mean: bool) -> np.ndarray:
    """R, or R^(1/L), at each token."""
    total = np.bincount(tokens.rollout, tokens.gap)
    exponent = total / np.maximum(np.bincount(tokens.rollout), 1) if mean else total
    return np.exp(np.clip(exponent, -60, 60))[tokens.rollout]


def _token(weigh: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tokens], Weighed]:
    def weighed(tokens: Tokens) -> Weighed:
        ratio = np.exp(tokens.gap)
        return weigh(ratio), ratio

    return weighed


def _whole(weigh: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tokens], Weighed]:
    def weighed(tokens: Tokens) -> Weighed:
        ratio = _rollout_ratio(tokens, mean=False)
        return weigh(ratio), ratio

    return weighed


def _kpop(tokens: Tokens) -> Weighed:
    """Kept where the KL of "this token" against "any other" is small both ways."""
    p, q = np.exp(tokens.p), np.exp(tokens.q)
    rest = np.log(-np.expm1(np.minimum(tokens.p, -1e-7))) - np.log(-np.expm1(np.minimum(tokens.q, -1e-7)))
    inside = tokens.p - tokens.q
    divergence = np.maximum(p * inside + (1 - p) * rest, -q * inside - (1 - q) * rest)
    ratio = np.exp(tokens.gap)
    return ratio * (divergence <= BOUNDS["kpop_max"]), ratio


def _dppo(tokens: Tokens) -> Weighed:
    """Masked where the probability has moved far the way that the advantage pushes."""
    moved = (np.exp(tokens.p) - np.exp(tokens.q)) * np.sign(tokens.advantage)
    ratio = np.exp(tokens.gap)
    return ratio * (moved <= BOUNDS["dppo_max"]), ratio


def _geometric(tokens: Tokens) -> Weighed:
    kept = _in_band(_rollout_ratio(tokens, mean=True), *_band_of("geo"))
    return kept.astype(np.float64), np.ones(len(kept))


def _opsm(tokens: Tokens) -> Weighed:
    far = -np.log(_rollout_ratio(tokens, mean=True)) > BOUNDS["opsm_max"]
    return 1.0 - ((tokens.advantage < 0) & far), np.ones(len(far))


def _gspo(tokens: Tokens) -> Weighed:
    ratio = _rollout_ratio(tokens, mean=True)
    above, below = ratio > 1 + BOUNDS["gspo_high"], ratio < 1 - BOUNDS["gspo_low"]
    cut = ((tokens.advantage > 0) & above) | ((tokens.advantage < 0) & below)
    return np.where(cut, 0.0, ratio), ratio


RULES: dict[str, tuple[str, Callable[[Tokens], Weighed]]] = {  # is_mode: (its bounds, what it does)
    "tis": ("token, at most {tis_max:g}", _token(lambda r: np.minimum(r, BOUNDS["tis_max"]))),
    "mis": ("token, {mis}", _token(lambda r: r * _in_band(r, *_band_of("mis")))),
    "icepop": (f"token, {1 / ICEPOP:g} to {ICEPOP:g}", _token(lambda r: r * _in_band(r, 1 / ICEPOP, ICEPOP))),
    "kpop": ("token, KL up to {kpop_max:g}", _kpop),
    "dppo_tv": ("token, |p − q| up to {dppo_max:g}", _dppo),
    "cispo": ("token, {cispo}", _token(lambda r: np.clip(r, *_band_of("cispo")))),
    "seq_tis": ("rollout, at most {tis_max:g}", _whole(lambda r: np.minimum(r, BOUNDS["tis_max"]))),
    "seq_mis": ("rollout, {mis}", _whole(lambda r: r * _in_band(r, *_band_of("mis")))),
    "geo_mask": ("rollout mean, {geo}", _geometric),
    "opsm": ("rollout, −log up to {opsm_max:g}", _opsm),
    "gspo": ("rollout mean, −{gspo_low:g} to +{gspo_high:g}", _gspo),
}
BANDS = {name: "{:g} to {:g}".format(*_band_of(name)) for name in ("mis", "cispo", "geo")}
