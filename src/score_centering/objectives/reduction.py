"""Loss weights: how the token losses of one update are averaged.

loss = Σ_t w_t·ℓ_t over all tokens of all microbatches and ranks of one update, so the denominators are those of the
whole update and splitting it changes nothing. Counts are Python integers and the division is float64 (half precision
would make 257 tokens 256 and 8191·128 infinite); each weight is rounded to float32 once.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def token_mean_weights(lengths: Tensor, update_tokens: int) -> Tensor:
    """w = 1/update_tokens for each generated token: the global token mean.

    Args:
        lengths: (N,) generated tokens of each rollout of this microbatch.
        update_tokens: generated tokens of the whole update, zero-variance groups included.

    Returns: (Σ lengths,) float32, the rollouts' tokens one after another.
    """
    lengths = torch.as_tensor(lengths)
    _require_positive("update_tokens", update_tokens)
    return torch.full((int(lengths.sum()),), 1 / update_tokens, dtype=torch.float32, device=lengths.device)


def sequence_mean_weights(lengths: Tensor, update_rows: int) -> Tensor:
    """w = 1/(update_rows·length) for each token: mean over the tokens of a rollout, then over rollouts.

    Args:
        lengths: (N,) generated tokens of each rollout of this microbatch.
        update_rows: rollouts of the whole update.

    Returns: (Σ lengths,) float32, the rollouts' tokens one after another.
    """
    lengths = torch.as_tensor(lengths)
    _require_positive("update_rows", update_rows)
    return (1 / (update_rows * lengths.double())).repeat_interleave(lengths).float()


REDUCTIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "token-mean": lambda lengths, update_tokens, update_rows: token_mean_weights(lengths, update_tokens),
    "seq-mean-token-mean": lambda lengths, update_tokens, update_rows: sequence_mean_weights(lengths, update_rows),
}


def _require_positive(name: str, count: int) -> None:
    if count <= 0:
        raise ValueError(f"loss weights: {name} is {count}; it must be positive")
