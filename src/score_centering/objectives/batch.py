"""The tokens of one microbatch, flat, and the checks on what the sampler recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_MASS_LIMIT = 1.001
SAMPLED_TOLERANCE = 2e-3  # nats; candidates travel in 16 bits


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
    """

    target_ids: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    mask: Tensor
    candidate_ids: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, masked rows included."""
        return self.target_ids.shape[0]


def check_shapes(batch: TokenBatch, rows: int, vocab_size: int, needs_candidates: bool) -> None:
    """Refuse a batch whose tensors do not fit T = `rows` and V = `vocab_size`. Reads no values, so it never waits for a
    GPU."""
    vectors = {
        name: getattr(batch, name)
        for name in ("target_ids", "sampler_logprobs", "advantages", "loss_weights", "mask", "old_logprobs")
    }
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (rows,):
            raise ValueError(
                f"token batch: {name} has shape {tuple(vector.shape)} for {rows} tokens; it must be ({rows},)"
            )
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"token batch: mask is {batch.mask.dtype}; it must be torch.bool")
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


def validate_batch(batch: TokenBatch, vocab_size: int, lengths: Sequence[int] | None = None) -> None:
    """Check the recorded values; raise ValueError that names the first faulty rollout and position.

    Faults: ids outside the vocabulary, duplicate candidates, NaN or positive log-probs, a head mass above 1.001, and a
    head that holds y with a log-prob other than the sampled one (a shifted row). Masked rows are not looked at. Call it
    once a batch, when it is built: it reads values back from the device.

    Args:
        lengths: tokens of each rollout, in order, to name rollout and position; None names the row alone.
    """
    check_shapes(batch, batch.tokens, vocab_size, batch.candidate_ids is not None)
    if lengths is not None and sum(lengths) != batch.tokens:
        raise ValueError(f"token batch: the rollouts have {sum(lengths)} tokens, the batch has {batch.tokens} rows")
    sampled = batch.sampler_logprobs
    faults = [
        ((batch.target_ids < 0) | (batch.target_ids >= vocab_size), f"the sampled id is outside 0…{vocab_size - 1}"),
        (sampled.isnan(), "the sampled log-prob is NaN"),
        (sampled > 0, "the sampled log-prob is positive"),
    ]
    if batch.candidate_ids is not None:
        ids, logprobs = batch.candidate_ids, batch.candidate_logprobs
        ordered = ids.sort(dim=1).values
        is_sampled = ids == batch.target_ids[:, None]
        shifted = is_sampled & ((logprobs - sampled[:, None]).abs() > SAMPLED_TOLERANCE)
        faults += [
            (((ids < 0) | (ids >= vocab_size)).any(1), f"a candidate id is outside 0…{vocab_size - 1}"),
            ((ordered[:, 1:] == ordered[:, :-1]).any(1), "a candidate id appears twice"),
            (logprobs.isnan().any(1), "a candidate log-prob is NaN"),
            ((logprobs > 0).any(1), "a candidate log-prob is positive"),
            (logprobs.double().exp().sum(1) > HEAD_MASS_LIMIT, f"the candidates' mass is above {HEAD_MASS_LIMIT}"),
            (
                shifted.any(1),
                "the head holds the sampled token with a log-prob that differs by more than "
                f"{SAMPLED_TOLERANCE} from the sampled one (a shifted row)",
            ),
        ]
    for fault, what in faults:
        rows = (fault & batch.mask).nonzero().flatten().tolist()
        if rows:
            raise ValueError(f"token batch: {_place(rows[0], lengths)}: {what}")


def _place(row: int, lengths: Sequence[int] | None) -> str:
    if lengths is None:
        return f"row {row}"
    rollout = 0
    while row >= lengths[rollout]:
        row -= lengths[rollout]
        rollout += 1
    return f"rollout {rollout}, position {row}"
