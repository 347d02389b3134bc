"""Group-relative advantages (GRPO, arXiv 2402.03300, eq. 3 of section 4.1.2)."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def advantages(rewards: Tensor, group_ids: Tensor, normalise: str = "std") -> Tensor:
    """A = (R − mean_group) / (std_group + 1e-6) per rollout, or A = R − mean_group.

    Args:
        rewards: (N,) integer, float32 or float64 tensor or array; half precision is refused, since 1.0 and 1.001 are
            one value there.
        group_ids: (N,) integers; rollouts of one prompt share an id. Groups may have different sizes and any order.
        normalise: "std" (ddof = 1) or "mean" (no division).

    Returns:
        (N,) float32. Computed in float64. A group of equal rewards, a group of one included, gives exactly 0.
    """
    if normalise not in ("std", "mean"):
        raise ValueError(f"advantages: normalise {normalise!r} is not one of std, mean")
    rewards, group_ids = torch.as_tensor(rewards), torch.as_tensor(group_ids)
    if rewards.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"advantages: rewards are {rewards.dtype}, which merges close rewards; pass float32 or float64"
        )
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"advantages: rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be one length (N,)"
        )
    rewards = rewards.double()
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"advantages: the reward of rollout {bad[0]} (group {group_ids[bad[0]].item()}) is "
            f"{rewards[bad[0]].item()}; rewards must be finite"
        )
    _, group, size = group_ids.unique(return_inverse=True, return_counts=True)
    groups = size.numel()
    empty = rewards.new_zeros(groups)
    lowest = empty.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, group, rewards, "amax", include_self=False)
    centred = rewards - (empty.index_add(0, group, rewards) / size)[group]
    if normalise == "std":
        squares = empty.index_add(0, group, centred.square())
        std = (squares / (size - 1).clamp_min(1)).sqrt()
        centred = centred / (std[group] + STD_EPSILON)
    return torch.where((lowest == highest)[group], 0.0, centred).float()
