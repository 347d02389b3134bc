"""Importance weights `f(r)` of the ratio `r = p/q`, each one small class that holds its own bounds.

A weight is written in its *mass form* `m(p, q) = q·f(p/q)`, on log-probabilities. The mass form is homogeneous of
degree one, so one function serves all three places where the loss needs `f`, and no unbounded ratio is ever
exponentiated:

    m_v = q_v·f(p_v/q_v) = m(log p_v, log q_v)       weighted mass of a recorded token
    ω   = f(p_y/q_y)     = m(log p_y − log q_y, 0)   weight of the sampled token
    α   = ρ·f(1/ρ)       = m(0, log ρ)               weight of the tail, where q̂ = ρ·p

Source: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv 2609.20807, Section 4 and Appendix A.
To add a weight: write one class and enter it in `WEIGHTS` (docs/adding-an-arm.md). Its fields are its bounds, and each
is read from the setting `score_centering.<field>`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A weight of single tokens. ValueError: bounds that describe none."""

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """m(p, q), of the arguments' common shape."""
        raise NotImplementedError

    def of_sampled(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """ω of the sampled tokens, (C,)."""
        log_ratio = log_p - log_q
        return self.mass(log_ratio, torch.zeros_like(log_ratio))

    def of_tail(self, log_rho: Tensor) -> Tensor:
        """α of what lies outside the head, (C,)."""
        return self.mass(torch.zeros_like(log_rho), log_rho)


@dataclass(frozen=True)
class Unweighted(Weight):
    """f(r) = 1: m = q."""

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return log_q.exp()


UNWEIGHTED = Unweighted()


@dataclass(frozen=True)
class Importance(Weight):
    """f(r) = r, uncapped: m = p. The score is unbiased by itself and every c_v is zero."""

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return log_p.exp()


@dataclass(frozen=True)
class Tis(Weight):
    """Truncated importance sampling, f(r) = min(r, tis_max): m = min(p, tis_max·q)."""

    tis_max: float

    def __post_init__(self) -> None:
        if not 0 < self.tis_max < math.inf:
            raise ValueError(f"tis_max {self.tis_max} must be positive and finite")

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.minimum(log_p, log_q + math.log(self.tis_max)).exp()


@dataclass(frozen=True)
class Mis(Weight):
    """Masked importance sampling, f(r) = r·1[mis_min ≤ r ≤ mis_max]: m = p inside the band, else 0."""

    mis_min: float
    mis_max: float

    def __post_init__(self) -> None:
        check_band("mis_min", self.mis_min, "mis_max", self.mis_max)

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _kept_in_band(log_p, log_q, self.mis_min, self.mis_max)


@dataclass(frozen=True)
class IcePop(Weight):
    """IcePop with one parameter β = mis_max, f(r) = r·1[1/β ≤ r ≤ β]: m = p inside the symmetric band, else 0."""

    mis_max: float

    def __post_init__(self) -> None:
        check_band("1/mis_max", 1 / self.mis_max, "mis_max", self.mis_max)

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _kept_in_band(log_p, log_q, 1 / self.mis_max, self.mis_max)


def check_band(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse a band of ratios that is not positive and finite or does not hold 1."""
    if not 0 < low <= 1 <= high < math.inf:
        raise ValueError(f"the band [{low_name}, {high_name}] = [{low}, {high}] must be positive, finite and hold 1")


def _kept_in_band(log_p: Tensor, log_q: Tensor, low: float, high: float) -> Tensor:
    """p·1[low ≤ p/q ≤ high]; 0 outside the band, also where p overflows."""
    log_ratio = log_p - log_q
    kept = (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))
    return torch.where(kept, log_p.exp(), 0.0)


WEIGHTS: dict[str, type[Weight]] = {
    "none": Unweighted,
    "importance": Importance,
    "tis": Tis,
    "mis": Mis,
    "icepop": IcePop,
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
