"""The drift itself: the mean update bias μ = Σ_v q_v ∇ log p_v, exact over the vocabulary, with and without centering.

Score centering with f = 1 subtracts Σ_{v∈H} c_v ∇ log p_v, c_v = q_v − ρ p_v, with ρ = max(1 − Q_H, 1e-6) /
max(1 − P_H, 1e-6). What is left has the weights w_v = q_v − 1[v ∈ H] c_v; K = 0 is the uncentered drift. In logit
space Σ_v w_v ∇ log p_v = w − (Σ w) p, and every other gradient follows by the chain rule.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from score_centering.objectives.divergence import log_tail_ratio

CHUNK = 64  # positions whose drift over the vocabulary is held at once


def update_weights(log_p: Tensor, log_q: Tensor, k: int) -> Tensor:
    """w (T, V) float64: the mean update bias is Σ_v w_v ∇ log p_v. K = 0 leaves centering out, so w = q.

    Args:
        log_p: (T, V) the trainer's log-probs at the sampling temperature.
        log_q: (T, V) the sampler's log-probs.
        k: head size.
    """
    p, q = log_p.double().exp(), log_q.double().exp()
    if not k:
        return q
    head = log_q.topk(k, dim=-1).indices
    p_head, q_head = p.gather(-1, head), q.gather(-1, head)
    rho = log_tail_ratio(q_head.sum(-1, keepdim=True), p_head.sum(-1, keepdim=True)).exp()
    return q.scatter(-1, head, rho * p_head)


def drift_logits(log_p: Tensor, log_q: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """Gradient of Σ_v sg(w_v) log p_v with respect to the trainer's logits: log_p, log_q (T, V) → (T, V) float64.

    The logits were divided by `temperature` before the softmax.
    """
    weights = update_weights(log_p, log_q, k)
    return (weights - weights.sum(-1, keepdim=True) * log_p.double().exp()) / temperature


def drift_norms(
    log_p: Tensor,
    log_q: Tensor,
    hidden: Tensor,
    lm_head_weight: Tensor,
    head_sizes: Sequence[int],
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> dict[str, float]:
    """Norms of the mean over positions of the update bias, without centering and at each K.

    `lm_head` is the Frobenius norm of (1/T) Σ_t g_t h_tᵀ, the bias of the LM head's gradient; `hidden` the Euclidean
    norm of (1/T) Σ_t Wᵀ g_t, the bias of the final hidden state; `share.…` each divided by its uncentered value.

    Args:
        log_p, log_q: (T, V) log-probs of trainer and sampler.
        hidden: (T, D) final hidden states, the input of the LM head.
        lm_head_weight: (V, D).
        chunk: positions processed at a time.
    """
    weight = lm_head_weight.double()
    norms = {}
    for k in (0, *head_sizes):
        head_bias = torch.zeros_like(weight)
        logit_sum = weight.new_zeros(weight.shape[0])
        for rows in torch.arange(len(log_p)).split(chunk):
            g = drift_logits(log_p[rows], log_q[rows], k, temperature)
            head_bias.addmm_(g.T, hidden[rows].double())
            logit_sum += g.sum(0)
        name = head_name(k)
        norms[f"drift.lm_head.{name}"] = head_bias.norm().item() / len(log_p)
        norms[f"drift.hidden.{name}"] = (logit_sum @ weight).norm().item() / len(log_p)
    return norms | shares(norms)


def parameter_drift_norms(
    log_prob_batches: Iterable[tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    head_sizes: Sequence[int],
) -> dict[str, float]:
    """Norm over all `parameters` of the mean over positions of the update bias, by autograd; summed in float64.

    Args:
        log_prob_batches: pairs of the trainer's log-probs (T, V) with a graph to `parameters`, and the sampler's.
    """
    totals = {k: [torch.zeros_like(p, dtype=torch.float64) for p in parameters] for k in (0, *head_sizes)}
    positions = 0
    for log_p, log_q in log_prob_batches:
        positions += len(log_p)
        for k, total in totals.items():
            weights = update_weights(log_p.detach(), log_q, k).to(log_p.dtype)
            gradients = torch.autograd.grad(log_p, parameters, weights, retain_graph=k != list(totals)[-1])
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += gradient
    norms = {
        f"drift.parameters.{head_name(k)}": torch.stack([g.norm() for g in total]).norm().item() / positions
        for k, total in totals.items()
    }
    return norms | shares(norms)


def shares(norms: dict[str, float]) -> dict[str, float]:
    """`drift_share.<space>.<K>`: what centering leaves of each space's uncentered drift."""
    result = {}
    for name, value in norms.items():
        _, space, head = name.split(".")
        uncentered = norms[f"drift.{space}.{head_name(0)}"]
        if head != head_name(0):
            result[f"drift_share.{space}.{head}"] = value / uncentered if uncentered > 0 else 0.0
    return result


def head_name(k: int) -> str:
    """`uncentered` for K = 0, else `k<K>`."""
    return f"k{k}" if k else "uncentered"
