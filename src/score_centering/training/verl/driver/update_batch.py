"""Rollouts as the tensors that verl hands to its workers."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from score_centering.rollout import Rollout


def to_tensordict(
    rollouts: Sequence[Rollout], advantages: Tensor, old_logprobs: Sequence[Tensor] | None = None, **settings: object
) -> TensorDict:
    """The rows of `rollouts` in verl's no-padding form; every tensor is a fresh copy.

    B rollouts, S tokens of prompt and response (ragged), R the longest response, K candidates.

    Args:
        advantages: (B,) float32.
        old_logprobs: (R,) float32 for each rollout; None: the trainer's policy is the old policy.
        settings: values that reach the engine beside the tensors, such as mini_batch_size.

    Returns:
        input_ids, position_ids (B, S) int64 ragged; loss_mask (B, R) int64; target_ids int64, sampler_logprobs,
        candidate_logprobs, old_logprobs float32 and candidate_ids int32, (B, R) or (B, R, K), zeros after a response.
    """
    whole = [np.concatenate([r.prompt_ids, r.token_ids]).astype(np.int64) for r in rollouts]
    rows = {
        "loss_mask": [np.ones(len(r.token_ids), dtype=np.int64) for r in rollouts],
        "target_ids": [r.token_ids.astype(np.int64) for r in rollouts],
        "sampler_logprobs": [r.logprobs for r in rollouts],
    }
    if rollouts[0].candidate_ids is not None:
        rows["candidate_ids"] = [r.candidate_ids for r in rollouts]
        rows["candidate_logprobs"] = [r.candidate_logprobs for r in rollouts]
    if old_logprobs is not None:
        rows["old_logprobs"] = [row.numpy() for row in old_logprobs]
    tensors = {
        "input_ids": _ragged(whole),
        "position_ids": _ragged([np.arange(len(row), dtype=np.int64) for row in whole]),
        "advantages": advantages.clone(),
        **{name: _padded(parts) for name, parts in rows.items()},
    }
    return tensordict_utils.get_tensordict(tensors, settings)


def _ragged(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


def _padded(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(np.array(row)) for row in rows], batch_first=True)
