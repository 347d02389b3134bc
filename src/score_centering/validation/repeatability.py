"""Do the same seeds give the same tokens when freed memory holds NaN? A kernel that reads stale memory fails this."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from score_centering.rollout import Rollout

SMALLEST_BYTES = 256


def poison_freed_memory(device: str, total_bytes: int = 64 << 20) -> None:
    """Fill blocks of every power-of-two size with NaN and free them, so that the next allocations get them.

    Args:
        device: cpu or cuda.
        total_bytes: about how much memory is filled, split evenly over the sizes, at most 256 blocks a size.
    """
    sizes = [SMALLEST_BYTES << i for i in range(64) if SMALLEST_BYTES << i <= total_bytes // 4]
    blocks = [
        torch.full((size // 4,), float("nan"), dtype=torch.float32, device=device)
        for size in sizes
        for _ in range(min(256, max(1, total_bytes // len(sizes) // size)))
    ]
    if device == "cuda":
        torch.cuda.synchronize()
    del blocks


def repeatability(
    generate: Callable[[], Sequence[Rollout]], device: str, poison: Callable[[str], None] = poison_freed_memory
) -> dict[str, float]:
    """Call `generate` twice with poisoned memory before each call and compare.

    Returns:
        equal_tokens_share: share of the generated tokens that are equal at equal positions.
        max_logprob_difference: largest difference of a sampled token's log-prob where the tokens so far were equal.
        nan_logprobs: number of log-probs, sampled and candidates, that are not finite, in both calls together.
    """
    poison(device)
    first = generate()
    poison(device)
    second = generate()
    equal = total = nans = 0
    difference = 0.0
    for a, b in zip(first, second, strict=True):
        shared = min(len(a.token_ids), len(b.token_ids))
        same = a.token_ids[:shared] == b.token_ids[:shared]
        equal += int(same.sum())
        total += max(len(a.token_ids), len(b.token_ids))
        prefix = shared if same.all() else int(same.argmin())
        gaps = np.abs(a.logprobs[:prefix] - b.logprobs[:prefix])
        difference = max(difference, float(gaps[np.isfinite(gaps)].max(initial=0.0)))
        nans += sum(_not_finite(rollout) for rollout in (a, b))
    return {
        "equal_tokens_share": equal / total,
        "max_logprob_difference": difference,
        "nan_logprobs": nans,
    }


def _not_finite(rollout: Rollout) -> int:
    count = int((~np.isfinite(rollout.logprobs)).sum())
    if rollout.candidate_logprobs is not None:
        count += int((~np.isfinite(rollout.candidate_logprobs)).sum())
    return count
