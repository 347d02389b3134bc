"""The response tokens of a micro-batch that verl hands to its workers, as the flat tokens of an objective."""

import torch
from tensordict import TensorDict
from torch import Tensor

from score_centering.objectives import Objective, TokenBatch


def response_rows(data: TensorDict, width: int | None = None) -> Tensor:
    """(T,) int64: the positions that predict the response tokens, rollout after rollout.

    Args:
        width: of rows that are padded on the right and then flattened; None: the rows lie packed one after another.
    """
    offsets = data["input_ids"].offsets()
    lengths = data["loss_mask"].sum(1)
    starts = offsets.diff() - lengths - 1
    starts = starts + (offsets[:-1] if width is None else width * torch.arange(len(starts), device=starts.device))
    within = torch.arange(data["loss_mask"].shape[1], device=offsets.device)
    return (starts[:, None] + within)[data["loss_mask"].bool()]


def to_tokens(data: TensorDict, objective: Objective) -> TokenBatch:
    """The T response tokens of a micro-batch, with the loss weights of the whole update that it belongs to."""
    kept = data["loss_mask"].bool()
    lengths = data["loss_mask"].sum(1)
    weights = objective.loss_weights(lengths, int(data["batch_num_tokens"]), int(data["global_batch_size"]))

    def flat(name: str) -> Tensor | None:
        return data[name][kept] if name in data else None

    return TokenBatch(
        target_ids=flat("target_ids"),
        sampler_logprobs=flat("sampler_logprobs"),
        advantages=data["advantages"].repeat_interleave(lengths),
        loss_weights=weights,
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=kept.device),
        candidate_ids=flat("candidate_ids"),
        candidate_logprobs=flat("candidate_logprobs"),
        old_logprobs=flat("old_logprobs"),
        sequence_ids=torch.arange(len(lengths), device=kept.device).repeat_interleave(lengths),
    )
