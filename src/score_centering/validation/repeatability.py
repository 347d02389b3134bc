"""Do the same seeds give the same tokens when freed memory holds NaN? A kernel that reads stale memory fails this."""

from collections.abc import Sequence

import numpy as np
import torch

from score_centering.rollout import Rollout

SMALLEST_BYTES = 256
BLOCKS_A_SIZE = 256


def poison_freed_memory(device: str, total_bytes: int = 64 << 20) -> None:
    """Fill blocks of every power-of-two size with NaN and free them, so that later allocations are handed them.

    Args:
        device: cpu or cuda.
        total_bytes: about how much memory is filled, split evenly over the sizes.
    """
    sizes = [SMALLEST_BYTES << i for i in range(64) if SMALLEST_BYTES << i <= total_bytes // 4]
    blocks = [
        torch.full((size // 4,), float("nan"), dtype=torch.float32, device=device)
        for size in sizes
        for _ in range(min(BLOCKS_A_SIZE, max(1, total_bytes // len(sizes) // size)))
    ]
    if device == "cuda":
        torch.cuda.synchronize()
    del blocks


def compare_repeats(first: Sequence[Rollout], second: Sequence[Rollout]) -> dict[str, float]:
    """Two generations from the same seeds.

    Returns:
        equal_tokens_share: share of positions with equal tokens; a position that only one of them has is unequal.
        max_logprob_difference: largest difference of sampled log-probs, in nats, up to a rollout's first unequal token.
        not_finite_logprobs: log-probs, of sampled tokens and candidates, that are not finite, in both together.
    """
    equal = total = not_finite = 0
    difference = 0.0
    for a, b in zip(first, second, strict=True):
        shared = min(len(a.token_ids), len(b.token_ids))
        same = a.token_ids[:shared] == b.token_ids[:shared]
        equal += int(same.sum())
        total += max(len(a.token_ids), len(b.token_ids))
        prefix = shared if same.all() else int(same.argmin())
        gaps = np.abs(a.logprobs[:prefix] - b.logprobs[:prefix])
        difference = max(difference, float(gaps[np.isfinite(gaps)].max(initial=0.0)))
        not_finite += _not_finite(a) + _not_finite(b)
    return {
        "equal_tokens_share": equal / total,
        "max_logprob_difference": difference,
        "not_finite_logprobs": not_finite,
    }


def _not_finite(rollout: Rollout) -> int:
    count = int((~np.isfinite(rollout.logprobs)).sum())
    if rollout.candidate_logprobs is not None:
        count += int((~np.isfinite(rollout.candidate_logprobs)).sum())
    return count
