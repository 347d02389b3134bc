"""The tokens of one microbatch, flat, and the check of their shapes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Generated tokens, flat over T, with what the sampler recorded. Rows where `mask` is False are ignored whatever
    they hold.

    Args:
        target_ids: (T,) int64, the sampled token y.
        sampler_logprobs: (T,) float32, log q_y at the sampling temperature.
        advantages: (T,) float32, A of the token's rollout.
        loss_weights: (T,) float32, w of loss = Σ_t w_t·ℓ_t.
        mask: (T,) bool, True for a generated token.
        candidate_ids: (T, K) integer, the sampler's K most probable tokens; None where the objective needs no head.
        candidate_logprobs: (T, K) float32, their log q; never renormalised.
        old_logprobs: (T,) float32, log p_y of the trainer's policy before this batch's updates; None means the present
            one.
        sequence_ids: (T,) int64, which rollout of the micro-batch a token belongs to: 0, 1, … in rising order, every
            rollout whole. Weights of whole rollouts and metrics by position need it.
    """

    target_ids: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    mask: Tensor
    candidate_ids: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    sequence_ids: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, masked rows included."""
        return self.target_ids.shape[0]


def rollout_ranks(sequence_ids: Tensor, mask: Tensor) -> Tensor:
    """0, 1, … for the rollouts in their order, whatever their ids; a masked row belongs to the one before it.

    sequence_ids (T,) int64, mask (T,) bool → (T,) int64.
    """
    ids = torch.where(mask, sequence_ids, 0).cummax(0).values
    return torch.cat([ids.new_zeros(min(1, len(ids))), (ids[1:] != ids[:-1]).long()]).cumsum(0)


def check_shapes(
    batch: TokenBatch, rows: int, vocab_size: int, needs_candidates: bool, needs_sequences: bool = False
) -> None:
    """Refuse a batch whose tensors do not fit T = `rows` and V = `vocab_size`. Reads no values, so it never waits for a
    GPU."""
    vectors = {
        name: getattr(batch, name)
        for name in (
            "target_ids",
            "sampler_logprobs",
            "advantages",
            "loss_weights",
            "mask",
            "old_logprobs",
            "sequence_ids",
        )
    }
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (rows,):
            raise ValueError(
                f"token batch: {name} has shape {tuple(vector.shape)} for {rows} tokens; it must be ({rows},)"
            )
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"token batch: mask is {batch.mask.dtype}; it must be torch.bool")
    if needs_sequences and batch.sequence_ids is None:
        raise ValueError("token batch: a weight of whole rollouts needs sequence_ids of shape (T,)")
    if not needs_candidates:
        return
    if batch.candidate_ids is None or batch.candidate_logprobs is None:
        raise ValueError("token batch: score centering needs candidate_ids and candidate_logprobs of shape (T, K)")
    if batch.candidate_ids.shape != batch.candidate_logprobs.shape or batch.candidate_ids.shape[:-1] != (rows,):
        raise ValueError(
            f"token batch: candidate_ids {tuple(batch.candidate_ids.shape)} and candidate_logprobs "
            f"{tuple(batch.candidate_logprobs.shape)} must both be ({rows}, K)"
        )
    if not 0 < batch.candidate_ids.shape[1] <= vocab_size:
        raise ValueError(
            f"token batch: K = {batch.candidate_ids.shape[1]} candidates of a vocabulary of {vocab_size}; "
            "1 ≤ K ≤ V is allowed"
        )
