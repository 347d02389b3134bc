"""How far the trainer's distribution p lies from the sampler's q, from log-probs alone. All sums are in float64.

Notation as in `docs/arms.md`: y is the sampled token, H the sampler's K most probable tokens, V the vocabulary,
T the number of generated positions. Log-probs are in nats.
"""

import torch
from torch import Tensor

from score_centering.objectives.divergence import k3, token_chi2


def sampled_gaps(log_p: Tensor, log_q: Tensor) -> dict[str, float]:
    """Gap statistics of the sampled tokens, from log_p, log_q (T,) of those tokens.

    With d = log p − log q: the mean, 95th percentile and maximum of |d|; K1 = mean(−d); K3 = mean(exp(d) − 1 − d) and
    the token χ² = mean(exp(2d)) − 1, both with d clamped to ±20. K1 and K3 estimate KL(q‖p), χ² estimates χ²(p‖q).
    """
    d = log_p.double() - log_q.double()
    magnitude = d.abs()
    return {
        "abs_logprob_gap_mean": magnitude.mean().item(),
        "abs_logprob_gap_p95": magnitude.quantile(0.95).item(),
        "abs_logprob_gap_max": magnitude.max().item(),
        "k1_kl": (-d).mean().item(),
        "k3_kl": k3(d).mean().item(),
        "token_chi2": token_chi2(d).mean().item(),
    }


def dense_gaps(log_p: Tensor, log_q: Tensor) -> dict[str, float]:
    """KL(q‖p) in nats, total variation and top-1 agreement of log_p, log_q (T, V), mean over positions."""
    p, q = log_p.double().exp(), log_q.double().exp()
    difference = log_q.double() - log_p.double()
    kl = torch.where(q > 0, q * difference, 0.0).sum(-1)
    return {
        "exact_kl": kl.mean().item(),
        "total_variation": (0.5 * (p - q).abs().sum(-1)).mean().item(),
        "top1_agreement": (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item(),
    }


def head_masses(candidate_logprobs: Tensor, candidate_log_p: Tensor, head_sizes: list[int]) -> dict[str, float]:
    """Mean Q_H and P_H at each K: the sampler's and the trainer's mass on the sampler's K most probable tokens.

    Args:
        candidate_logprobs: (T, K_max) the sampler's log-probs, most probable first.
        candidate_log_p: (T, K_max) the trainer's log-probs of the same tokens.
        head_sizes: each K, at most K_max.
    """
    q, p = candidate_logprobs.double().exp(), candidate_log_p.double().exp()
    masses = {}
    for k in head_sizes:
        masses[f"head_mass_sampler.k{k}"] = q[:, :k].sum(-1).mean().item()
        masses[f"head_mass_trainer.k{k}"] = p[:, :k].sum(-1).mean().item()
    return masses


def allowed_head_sizes(requested: list[int], configured: int, vocab_size: int) -> tuple[list[int], list[str]]:
    """The sorted head sizes to measure, with the configured K among them and none above V, and a note for each clip."""
    notes = [
        f"head size {k} exceeds the vocabulary of {vocab_size} tokens: measured at {vocab_size}"
        for k in sorted({*requested, configured})
        if k > vocab_size
    ]
    return sorted({min(k, vocab_size) for k in (*requested, configured)}), notes
