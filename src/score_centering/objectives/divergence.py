"""How far the trainer's policy p lies from the sampler's q: the limits and the formulas that every room shares."""

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
TAIL_FLOOR = 1e-6


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio (...): log p − log q clamped to ±LOG_RATIO_LIMIT nats, so that its exponential stays finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) − 1 − d of log_ratio (...), d = log p − log q bounded: an estimate of KL(q‖p) in nats where y is drawn
    from q (Schulman, Approximating KL Divergence, 2020). expm1 keeps the digits of a small d."""
    d = bounded(log_ratio)
    return d.expm1() - d


def token_chi2(log_ratio: Tensor) -> Tensor:
    """exp(2d) − 1 of log_ratio (...), d bounded: an estimate of χ²(p‖q)."""
    return (2 * bounded(log_ratio)).expm1()


def log_tail_ratio(head_mass_q: Tensor, head_mass_p: Tensor) -> Tensor:
    """log ρ, ρ = max(1 − Q_H, TAIL_FLOOR) / max(1 − P_H, TAIL_FLOOR): what lies outside the head, q̂ = ρ·p there.

    head_mass_q, head_mass_p (...) → (...).
    """
    return (1 - head_mass_q).clamp_min(TAIL_FLOOR).log() - (1 - head_mass_p).clamp_min(TAIL_FLOOR).log()
