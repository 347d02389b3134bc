"""Importance weights `f(r)` of the ratio `r = p/q`, each one small function.

A weight is written in its *mass form* `m(p, q) = q·f(p/q)`, on log-probabilities. The mass form is homogeneous of
degree one, so one function serves all three places where the loss needs `f`, and no unbounded ratio is ever
exponentiated:

    m_v = q_v·f(p_v/q_v) = m(log p_v, log q_v)       weighted mass of a recorded token
    ω   = f(p_y/q_y)     = m(log p_y − log q_y, 0)   weight of the sampled token
    α   = ρ·f(1/ρ)       = m(0, log ρ)               weight of the tail, where q̂ = ρ·p

Source: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv 2609.20807, Section 4 and Appendix A.
To add a weight: write one function and enter it in `WEIGHTS` (docs/adding-an-arm.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """The limits that a weight may read: `tis_max` caps the ratio, `[mis_min, mis_max]` is the band that is kept."""

    tis_max: float
    mis_min: float
    mis_max: float


def _kept_in_band(log_p: Tensor, log_q: Tensor, low: float, high: float) -> Tensor:
    """p·1[low ≤ p/q ≤ high]; 0 outside the band, also where p overflows."""
    log_ratio = log_p - log_q
    kept = (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))
    return torch.where(kept, log_p.exp(), 0.0)


def none(log_p: Tensor, log_q: Tensor, bounds: Bounds) -> Tensor:
    """f(r) = 1: m = q."""
    return log_q.exp()


def importance(log_p: Tensor, log_q: Tensor, bounds: Bounds) -> Tensor:
    """f(r) = r, uncapped: m = p. The score is unbiased by itself and every c_v is zero."""
    return log_p.exp()


def tis(log_p: Tensor, log_q: Tensor, bounds: Bounds) -> Tensor:
    """Truncated importance sampling, f(r) = min(r, tis_max): m = min(p, tis_max·q)."""
    return torch.minimum(log_p, log_q + math.log(bounds.tis_max)).exp()


def mis(log_p: Tensor, log_q: Tensor, bounds: Bounds) -> Tensor:
    """Masked importance sampling, f(r) = r·1[mis_min ≤ r ≤ mis_max]: m = p inside the band, else 0."""
    return _kept_in_band(log_p, log_q, bounds.mis_min, bounds.mis_max)


def icepop(log_p: Tensor, log_q: Tensor, bounds: Bounds) -> Tensor:
    """IcePop with one parameter β = mis_max, f(r) = r·1[1/β ≤ r ≤ β]: m = p inside the symmetric band, else 0."""
    return _kept_in_band(log_p, log_q, 1 / bounds.mis_max, bounds.mis_max)


WEIGHTS: dict[str, Callable[[Tensor, Tensor, Bounds], Tensor]] = {
    "none": none,
    "importance": importance,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
}
