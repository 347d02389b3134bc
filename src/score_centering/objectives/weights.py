"""Corrections of the sampler's mismatch as weights `f`, each one small class that holds its own bounds.

A weight of one token is a function of the ratio `r = p/q` (p the trainer's probability of a token, q the sampler's),
written in its *mass form* `m(p, q) = q·f`, on log-probabilities, so that no unbounded ratio is exponentiated where the
loss needs it:

    m_v = q_v·f(p_v/q_v)     weighted mass of a recorded token
    ω   = f(p_y/q_y)         weight of the sampled token
    α   = ρ·f(1/ρ)           weight of the tail, where q̂ = ρ·p

Where f depends on r alone the mass form is homogeneous of degree one: ω = m(log p_y − log q_y, 0), α = m(0, log ρ).

A weight of a whole rollout is one number for all of its tokens. Score centering subtracts the mean of the *weighted*
score given what came before; with such a weight that mean is over all continuations, no sum over the recorded head.

Source: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv 2609.20807, Section 4 and Appendix A; each
correction names its own. To add one: write one class and enter it in `WEIGHTS` (docs/adding-an-arm.md). Its fields are
its bounds, and each is read from the setting `score_centering.<field>`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from score_centering.objectives.batch import TokenBatch
from score_centering.objectives.divergence import bounded


@dataclass(frozen=True)
class Weight:
    """A correction. ValueError: bounds that describe none. clips: whether `clipped` is defined."""

    clips: ClassVar[bool] = False

    def of_sampled(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        """ω of the sampled tokens, (C,); log_p: (C,) log p_y."""
        raise NotImplementedError

    def clipped(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        """(C,) bool: where a bound changed the ratio; of weights that clip."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenWeight(Weight):
    """A weight of single tokens. `gains` are the advantages, of a shape that broadcasts."""

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        """m(p, q), of log_p's and log_q's common shape."""
        raise NotImplementedError

    def of_sampled(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        log_ratio = log_p - rows.sampler_logprobs
        return self.mass(log_ratio, torch.zeros_like(log_ratio), rows.advantages)

    def of_tail(self, log_rho: Tensor, gains: Tensor) -> Tensor:
        """α of what lies outside the head, (C,)."""
        return self.mass(torch.zeros_like(log_rho), log_rho, gains)


@dataclass(frozen=True)
class Unweighted(TokenWeight):
    """f(r) = 1: m = q."""

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return log_q.exp()


UNWEIGHTED = Unweighted()


@dataclass(frozen=True)
class Importance(TokenWeight):
    """f(r) = r: m = p. The score is unbiased by itself and every c_v is zero. Ratios count as e^60 at most, which no
    float32 sum turns into infinity."""

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return torch.minimum(log_p, log_q + 60.0).exp()


@dataclass(frozen=True)
class Tis(TokenWeight):
    """Truncated importance sampling, f(r) = min(r, tis_max): m = min(p, tis_max·q)."""

    clips: ClassVar[bool] = True

    tis_max: float

    def __post_init__(self) -> None:
        _check_cap("tis_max", self.tis_max)

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return torch.minimum(log_p, log_q + math.log(self.tis_max)).exp()

    def clipped(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        return log_p - rows.sampler_logprobs > math.log(self.tis_max)


@dataclass(frozen=True)
class Cispo(TokenWeight):
    """CISPO, f(r) = clip(r, cispo_min, cispo_max): m = p between cispo_min·q and cispo_max·q (MiniMax-M1, arXiv
    2506.13585, with 1 − ε_low and 1 + ε_high); cispo_min = 0 leaves small ratios alone."""

    clips: ClassVar[bool] = True

    cispo_min: float
    cispo_max: float

    def __post_init__(self) -> None:
        if not 0 <= self.cispo_min <= 1 <= self.cispo_max < math.inf:
            raise ValueError(
                f"the clip [cispo_min, cispo_max] = [{self.cispo_min}, {self.cispo_max}] must be finite, not negative "
                "and hold 1"
            )

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        capped = torch.minimum(log_p, log_q + math.log(self.cispo_max))
        return torch.maximum(capped, log_q + _log(self.cispo_min)).exp()

    def clipped(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        log_ratio = log_p - rows.sampler_logprobs
        return (log_ratio > math.log(self.cispo_max)) | (log_ratio < _log(self.cispo_min))


@dataclass(frozen=True)
class Mis(TokenWeight):
    """Masked importance sampling, f(r) = r·1[mis_min ≤ r ≤ mis_max]: m = p inside the band, else 0. IcePop with its two
    bounds (Ring-1T, arXiv 2510.18855)."""

    mis_min: float
    mis_max: float

    def __post_init__(self) -> None:
        _check_band("mis_min", self.mis_min, "mis_max", self.mis_max)

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return torch.where(_in_band(log_p - log_q, self.mis_min, self.mis_max), log_p.exp(), 0.0)


@dataclass(frozen=True)
class IcePop(TokenWeight):
    """IcePop with one parameter β = mis_max, f(r) = r·1[1/β ≤ r ≤ β]: m = p inside the symmetric band, else 0."""

    mis_max: float

    def __post_init__(self) -> None:
        _check_band("1/mis_max", 1 / self.mis_max, "mis_max", self.mis_max)

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return torch.where(_in_band(log_p - log_q, 1 / self.mis_max, self.mis_max), log_p.exp(), 0.0)


@dataclass(frozen=True)
class TrustRegion(TokenWeight):
    """f = r·1[kept], where a token is kept by p and q themselves and not by their ratio: m = p or 0.

    The tail counts as kept: α = 1. That is exact for q̂ where the head's masses P_H and Q_H, taken as one token, would
    be kept: both divergences below grow with the mass that they compare, and no token of the tail has more than all.
    """

    def kept(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        """bool, of the arguments' common shape."""
        raise NotImplementedError

    def mass(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return torch.where(self.kept(log_p, log_q, gains), log_p.exp(), 0.0)

    def of_sampled(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        kept = self.kept(log_p, rows.sampler_logprobs, rows.advantages)
        return torch.where(kept, bounded(log_p - rows.sampler_logprobs).exp(), 0.0)

    def of_tail(self, log_rho: Tensor, gains: Tensor) -> Tensor:
        return torch.ones_like(log_rho)


@dataclass(frozen=True)
class KPop(TrustRegion):
    """KPop: kept where max(D(p‖q), D(q‖p)) ≤ kpop_max, D the KL divergence in nats of "this token" against "any other",
    D(p‖q) = p·log(p/q) + (1−p)·log((1−p)/(1−q)) (Guo et al., Ant Group, 2026, ringtech.notion.site/kpop)."""

    kpop_max: float

    def __post_init__(self) -> None:
        _check_cap("kpop_max", self.kpop_max)

    def kept(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        inside, outside = log_p - log_q, _log_of_rest(log_p) - _log_of_rest(log_q)
        p, q = log_p.exp(), log_q.exp()
        forward = p * inside + (1 - p) * outside
        backward = -q * inside - (1 - q) * outside
        return torch.maximum(forward, backward) <= self.kpop_max


@dataclass(frozen=True)
class DppoTv(TrustRegion):
    """DPPO with the binary total variation |p − q|: masked where it exceeds dppo_max and the update would go further
    that way, so p > q and A > 0 or p < q and A < 0 (arXiv 2602.04879, eq. 12)."""

    dppo_max: float

    def __post_init__(self) -> None:
        if not 0 < self.dppo_max <= 1:
            raise ValueError(f"dppo_max {self.dppo_max} must lie in (0, 1]")

    def kept(self, log_p: Tensor, log_q: Tensor, gains: Tensor) -> Tensor:
        return (log_p.exp() - log_q.exp()) * gains.sign() <= self.dppo_max


@dataclass(frozen=True)
class SequenceWeight(Weight):
    """One weight for all tokens of a rollout, a function of S = Σ_t d_t and of its mean S/L, d = log p_y − log q_y."""

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        """The weight from S, S/L and the advantage of the rollout, each (C,) at its tokens."""
        raise NotImplementedError

    def clipped_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        """Where a bound binds, as `of_rollout`."""
        raise NotImplementedError

    def of_sampled(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        return self.of_rollout(*_of_rollouts(log_p, rows), rows.advantages)

    def clipped(self, log_p: Tensor, rows: TokenBatch) -> Tensor:
        return self.clipped_rollout(*_of_rollouts(log_p, rows), rows.advantages)


@dataclass(frozen=True)
class SequenceTis(SequenceWeight):
    """min(Π_t r_t, tis_max) (Liu, Li et al., When Speed Kills Stability, 2025)."""

    clips: ClassVar[bool] = True

    tis_max: float

    def __post_init__(self) -> None:
        _check_cap("tis_max", self.tis_max)

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return total.clamp_max(math.log(self.tis_max)).exp()

    def clipped_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return total > math.log(self.tis_max)


@dataclass(frozen=True)
class SequenceMis(SequenceWeight):
    """R·1[mis_min ≤ R ≤ mis_max] of R = Π_t r_t (the same source)."""

    mis_min: float
    mis_max: float

    def __post_init__(self) -> None:
        _check_band("mis_min", self.mis_min, "mis_max", self.mis_max)

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return torch.where(_in_band(total, self.mis_min, self.mis_max), total.exp(), 0.0)


@dataclass(frozen=True)
class GeometricMask(SequenceWeight):
    """1[geo_min ≤ (Π_t r_t)^(1/L) ≤ geo_max]: whole rollouts are kept or rejected, without a ratio (Geo-RS of the same
    authors)."""

    geo_min: float
    geo_max: float

    def __post_init__(self) -> None:
        _check_band("geo_min", self.geo_min, "geo_max", self.geo_max)

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return _in_band(mean, self.geo_min, self.geo_max).to(mean.dtype)


@dataclass(frozen=True)
class Opsm(SequenceWeight):
    """Off-policy sequence masking: 0 where A < 0 and the mean of log q − log p exceeds opsm_max nats a token, else 1
    (DeepSeek-V3.2, arXiv 2512.02556)."""

    opsm_max: float

    def __post_init__(self) -> None:
        _check_cap("opsm_max", self.opsm_max)

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return (~((gains < 0) & (-mean > self.opsm_max))).to(mean.dtype)


@dataclass(frozen=True)
class Gspo(SequenceWeight):
    """GSPO's gradient: s = (Π_t r_t)^(1/L), and 0 where its clip to [1 − gspo_low, 1 + gspo_high] binds: A > 0 above or
    A < 0 below (arXiv 2507.18071). The ratio is to the sampler, which is the old policy of a batch; its
    average over a rollout's tokens and then over rollouts is `loss_agg_mode: seq-mean-token-mean`."""

    clips: ClassVar[bool] = True

    gspo_low: float
    gspo_high: float

    def __post_init__(self) -> None:
        if not (0 <= self.gspo_low < 1 and 0 <= self.gspo_high < math.inf):
            raise ValueError(
                f"gspo_low {self.gspo_low} must lie in [0, 1) and gspo_high {self.gspo_high} be at least 0"
            )

    def of_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        return torch.where(self.clipped_rollout(total, mean, gains), 0.0, bounded(mean).exp())

    def clipped_rollout(self, total: Tensor, mean: Tensor, gains: Tensor) -> Tensor:
        above, below = mean > math.log1p(self.gspo_high), mean < math.log1p(-self.gspo_low)
        return ((gains > 0) & above) | ((gains < 0) & below)


def _of_rollouts(log_p: Tensor, rows: TokenBatch) -> tuple[Tensor, Tensor]:
    """S and S/L of each token's rollout, (C,); `rows` holds whole rollouts, and masked rows count for nothing."""
    local = rows.sequence_ids - rows.sequence_ids[:1]
    kept = rows.mask.to(log_p.dtype)
    gaps = (log_p - rows.sampler_logprobs) * kept
    empty = torch.zeros_like(log_p)
    total = empty.index_add(0, local, gaps)[local]
    return total, total / empty.index_add(0, local, kept).clamp_min(1)[local]


def _check_cap(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} {value} must be positive and finite")


def _check_band(low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 < low <= 1 <= high < math.inf:
        raise ValueError(f"the band [{low_name}, {high_name}] = [{low}, {high}] must be positive, finite and hold 1")


def _in_band(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _log_of_rest(log_p: Tensor) -> Tensor:
    """log(1 − p), finite also where rounding made p 1."""
    return torch.log(-torch.expm1(log_p.clamp_max(-1e-7)))


WEIGHTS: dict[str, type[Weight]] = {
    "none": Unweighted,
    "importance": Importance,
    "tis": Tis,
    "mis": Mis,
    "icepop": IcePop,
    "kpop": KPop,
    "dppo_tv": DppoTv,
    "cispo": Cispo,
    "seq_tis": SequenceTis,
    "seq_mis": SequenceMis,
    "geo_mask": GeometricMask,
    "opsm": Opsm,
    "gspo": Gspo,
}


def build_weight(is_mode: str, bounds: Mapping[str, float]) -> Weight:
    """The weight called `is_mode`; it takes the bounds it has from `bounds` and leaves the others.

    Raises:
        ValueError: an unknown name, or bounds that describe no weight.
    """
    if is_mode not in WEIGHTS:
        raise ValueError(f"is_mode {is_mode!r} is not one of {', '.join(WEIGHTS)}")
    weight = WEIGHTS[is_mode]
    return weight(**{field.name: bounds[field.name] for field in fields(weight)})
