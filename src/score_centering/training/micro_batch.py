"""From rollouts to the tensors of a training forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from score_centering.objectives import TokenBatch
from score_centering.rollout import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward.

    input_ids: (B, S) int64, prompt then response, padded on the right.
    hidden_index: (T,) int64 into the flattened (B·S) positions: the position whose logits predict each response token.
    tokens: what the sampler recorded of those T tokens.
    routes: (B, S, layers, top-k) int64, the experts the sampler chose; 0 for last tokens and padding. None if it
        recorded none.
    """

    input_ids: Tensor
    hidden_index: Tensor
    tokens: TokenBatch
    routes: Tensor | None


def make_micro_batch(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    loss_weights: Tensor,
    device: torch.device | str,
    old_logprobs: Sequence[Tensor] | None = None,
) -> MicroBatch:
    """The rows of `rollouts`, which stay as they are: every tensor is a fresh copy.

    Args:
        advantages: (B,) float32, one a rollout.
        loss_weights: (T,) float32, one a generated token, rollout after rollout.
        old_logprobs: (R,) float32 for each rollout; None: the trainer's policy is the old policy.
    """
    prompts = [len(rollout.prompt_ids) for rollout in rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    width = max(p + r for p, r in zip(prompts, lengths, strict=True))
    input_ids = np.zeros((len(rollouts), width), dtype=np.int64)
    index = []
    for row, rollout in enumerate(rollouts):
        input_ids[row, : prompts[row]] = rollout.prompt_ids
        input_ids[row, prompts[row] : prompts[row] + lengths[row]] = rollout.token_ids
        index.append(row * width + prompts[row] - 1 + np.arange(lengths[row]))
    counts = torch.tensor(lengths)
    has_head = rollouts[0].candidate_ids is not None
    tokens = TokenBatch(
        target_ids=_flat([rollout.token_ids for rollout in rollouts]).long().to(device),
        sampler_logprobs=_flat([rollout.logprobs for rollout in rollouts]).to(device),
        advantages=advantages.repeat_interleave(counts).to(device),
        loss_weights=loss_weights.to(device),
        mask=torch.ones(int(counts.sum()), dtype=torch.bool, device=device),
        candidate_ids=_flat([rollout.candidate_ids for rollout in rollouts]).to(device) if has_head else None,
        candidate_logprobs=_flat([rollout.candidate_logprobs for rollout in rollouts]).to(device) if has_head else None,
        old_logprobs=None if old_logprobs is None else torch.cat(list(old_logprobs)).to(device),
        sequence_ids=torch.arange(len(rollouts)).repeat_interleave(counts).to(device),
    )
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        hidden_index=torch.from_numpy(np.concatenate(index)).to(device),
        tokens=tokens,
        routes=None if rollouts[0].routes is None else _routes(rollouts, width).to(device),
    )


def _routes(rollouts: Sequence[Rollout], width: int) -> Tensor:
    routes = np.zeros((len(rollouts), width, *rollouts[0].routes.shape[1:]), dtype=np.int64)
    for row, rollout in zip(routes, rollouts, strict=True):
        if rollout.routes is None:
            where = f"rollout (prompt {rollout.prompt_index}, sample {rollout.sample_index})"
            raise ValueError(f"{where}: it has no routes, others of its batch have them")
        row[: len(rollout.routes)] = rollout.routes
    return torch.from_numpy(routes)


def _flat(rows: Sequence[np.ndarray | None]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows))  # type: ignore[arg-type]
