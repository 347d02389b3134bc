"""The loss of single tokens and the few numbers that its gradient is made of. Pure functions on (C,) and (C, K)
tensors.

Notation of the formulas, at one position: p the trainer's distribution, q the sampler's, y the sampled token, A the
advantage, H the recorded head, P_H and Q_H its mass under p and q, f the importance weight, m_v = q_v·f(p_v/q_v), M =
Σ_H m_v, ω = f(p_y/q_y), ρ = max(1−Q_H, 1e-6)/max(1−P_H, 1e-6), α = ρ·f(1/ρ), c_v = m_v − α·p_v.

    ℓ = −sg(A)·[sg(ω)·log p_y − Σ_{v∈H} sg(c_v)·log p_v]

Source: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv 2609.20807, Section 4 and Appendix A; the
clipped surrogate is PPO's, arXiv 1707.06347, eq. 7, with separate lower and upper ε (DAPO, arXiv 2503.14476).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from score_centering.objectives.batch import TokenBatch, rollout_ranks
from score_centering.objectives.divergence import bounded, log_tail_ratio
from score_centering.objectives.objective import Objective


class TokenTerms(NamedTuple):
    """Per-token results, each (C,) in the arithmetic dtype; None where the objective has no such term.

    loss: ℓ. log_p: log p_y. entropy: −Σ p log p in nats. weight: ω. clipped: 1 where a bound
    of the weight or PPO's clip binds.
    head_mass_sampler, head_mass_trainer: Q_H, P_H. correction_abs: Σ_H |c_v|.
    """

    loss: Tensor
    log_p: Tensor
    entropy: Tensor
    weight: Tensor | None = None
    clipped: Tensor | None = None
    head_mass_sampler: Tensor | None = None
    head_mass_trainer: Tensor | None = None
    correction_abs: Tensor | None = None


class SoftmaxGradient(NamedTuple):
    """dℓ/dz of z = logits/temperature in the form `dense·p_j`, with the few entries `ids` holding `values` instead.

    dense: (C,). ids: (C, 1 + K) int64, y first; later entries win, so a head that holds y overrides the first. values:
        (C, 1 + K).
    """

    dense: Tensor
    ids: Tensor
    values: Tensor


def token_terms(
    log_p: Tensor, entropy: Tensor, head_log_p: Tensor | None, rows: TokenBatch, objective: Objective
) -> tuple[TokenTerms, SoftmaxGradient]:
    """Loss terms of C tokens and the gradient of ℓ, both exact in the dtype of `log_p`.

    Args:
        log_p: (C,) log p_y. entropy: (C,). head_log_p: (C, K) log p_v of the candidates, None without centering.
        rows: the C tokens, as `harmless_rows` returns them.
    """
    if objective.clips:
        return _clipped_terms(log_p, entropy, rows, objective)
    weight = objective.weight.of_sampled(log_p, rows)
    weight = weight if objective.score else torch.zeros_like(weight)
    clipped = objective.weight.clipped(log_p, rows).to(log_p.dtype) if objective.weight.clips else None
    if not objective.centering:
        gradient = _weighted_score_gradient(log_p, weight, rows)
        return TokenTerms(-rows.advantages * weight * log_p, log_p, entropy, weight, clipped), gradient

    head_log_q = rows.candidate_logprobs
    head_p, head_q = head_log_p.exp(), head_log_q.exp()
    mass_p, mass_q = head_p.sum(1), head_q.sum(1)
    alpha = objective.weight.of_tail(log_tail_ratio(mass_q, mass_p), rows.advantages)
    weighted = objective.weight.mass(head_log_p, head_log_q, rows.advantages[:, None])
    correction = weighted - alpha[:, None] * head_p
    correction_value = torch.where(correction == 0, 0.0, correction * head_log_p).sum(1)

    # −dℓ/dz_j / A = ω·1[j=y] − c_j·1[j∈H] − (ω − Σc)·p_j, with Σc = M − α·P_H put in: a large α then meets 1 − P_H,
    # never a difference of two large numbers.
    weighted_mass = weighted.sum(1)
    dense = weight - weighted_mass + alpha * mass_p
    in_head = (weight - weighted_mass - alpha * (1 - mass_p))[:, None] * head_p + weighted
    is_sampled = rows.candidate_ids == rows.target_ids[:, None]
    in_head = in_head - weight[:, None] * is_sampled
    sampled = dense * log_p.exp() - weight
    gradient = SoftmaxGradient(
        dense=rows.advantages * dense,
        ids=torch.cat([rows.target_ids[:, None], rows.candidate_ids], 1),
        values=rows.advantages[:, None] * torch.cat([sampled[:, None], in_head], 1),
    )
    terms = TokenTerms(
        loss=-rows.advantages * (weight * log_p - correction_value),
        log_p=log_p,
        entropy=entropy,
        weight=weight,
        clipped=clipped,
        head_mass_sampler=mass_q,
        head_mass_trainer=mass_p,
        correction_abs=correction.abs().sum(1),
    )
    return terms, gradient


def _clipped_terms(
    log_p: Tensor, entropy: Tensor, rows: TokenBatch, objective: Objective
) -> tuple[TokenTerms, SoftmaxGradient]:
    """PPO's ℓ = −min(r·A, clip(r, 1−ε_low, 1+ε_high)·A) with r = p_y/p_old; r = 1 when `old_logprobs` is None."""
    old_log_p = log_p if rows.old_logprobs is None else rows.old_logprobs
    ratio = bounded(log_p - old_log_p).exp()
    free = ratio * rows.advantages
    bound = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * rows.advantages
    clipped = bound < free
    gradient = _weighted_score_gradient(log_p, torch.where(clipped, 0.0, ratio), rows)
    return TokenTerms(-torch.minimum(free, bound), log_p, entropy, clipped=clipped.to(log_p.dtype)), gradient


def _weighted_score_gradient(log_p: Tensor, weight: Tensor, rows: TokenBatch) -> SoftmaxGradient:
    """dℓ/dz_j = A·ω·(p_j − 1[j=y]) of ℓ = −A·sg(ω)·log p_y."""
    dense = rows.advantages * weight
    return SoftmaxGradient(dense, rows.target_ids[:, None], (dense * log_p.expm1())[:, None])


def harmless_rows(batch: TokenBatch, dtype: torch.dtype, needs_candidates: bool) -> TokenBatch:
    """A copy in the arithmetic dtype whose masked rows hold zeros, so that NaN, −inf or −1 there can reach nothing.

    Candidates are dropped where the objective has no use for them. The batch itself is left as it is.
    """
    mask = batch.mask

    def clean(values: Tensor, wanted: torch.dtype) -> Tensor:
        rows = mask.view(-1, *[1] * (values.dim() - 1))
        return torch.where(rows, values.to(wanted), 0)

    return TokenBatch(
        target_ids=clean(batch.target_ids, torch.int64),
        sampler_logprobs=clean(batch.sampler_logprobs, dtype),
        advantages=clean(batch.advantages, dtype),
        loss_weights=clean(batch.loss_weights, dtype),
        mask=mask,
        candidate_ids=clean(batch.candidate_ids, torch.int64) if needs_candidates else None,
        candidate_logprobs=clean(batch.candidate_logprobs, dtype) if needs_candidates else None,
        old_logprobs=None if batch.old_logprobs is None else clean(batch.old_logprobs, dtype),
        sequence_ids=None if batch.sequence_ids is None else rollout_ranks(batch.sequence_ids, mask),
    )
