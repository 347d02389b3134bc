"""Choosing the next token, and recording the probabilities it was chosen with, in one call.

Every rollout has its own stream of uniform numbers (`rollout.streams`), so a token never depends on what shares its
batch, on the device, or on the order of the work.
"""

import numpy as np
import torch
from torch import Tensor

from score_centering.rollout.candidates import MAX_CODE, STEPS_PER_NAT

_CDF_BLOCK = 256
_HEAD_BLOCK = 32


def log_probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-softmax of logits (B, V) bfloat16 / temperature (), over the whole vocabulary, in FP32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: logprobs (B, V) float32, uniform (B,) float64 in [0, 1) → token ids (B,) int64.

    The cumulative sum runs in float64 over blocks of the vocabulary (FP32 sums), then inside the block that is hit; no
    token of probability 0 is ever drawn.
    """
    probs = _in_blocks(logprobs.exp(), _CDF_BLOCK, fill=0.0)
    cdf = probs.sum(dim=-1).double().cumsum(dim=-1)  # (B, blocks)
    target = uniform[:, None] * cdf[:, -1:]
    block = (cdf <= target).sum(dim=-1, keepdim=True)
    before = torch.nn.functional.pad(cdf, (1, 0)).gather(1, block)
    inside = probs[_rows(probs), block].squeeze(1).double().cumsum(dim=-1)
    target = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-52))
    return block.squeeze(1) * _CDF_BLOCK + (inside <= target).sum(dim=-1)


def head(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens of each row: logprobs (B, V) → log-probs (B, K) descending, ids (B, K) int64.

    Over a large vocabulary: the K largest values lie in the K blocks with the largest maxima.
    """
    if count * _HEAD_BLOCK * 2 > logprobs.shape[-1]:
        return _largest(logprobs, count)
    blocks = _in_blocks(logprobs, _HEAD_BLOCK, fill=-torch.inf)
    _, chosen = _largest(blocks.amax(dim=-1), count, ordered=False)
    values, index = _largest(blocks[_rows(blocks), chosen].flatten(1), count)
    return values, chosen.gather(1, index // _HEAD_BLOCK) * _HEAD_BLOCK + index % _HEAD_BLOCK


def round_to_grid(logprobs: Tensor) -> Tensor:
    """`candidates.round_logprobs` of logprobs (...), on its device."""
    codes = (logprobs * -STEPS_PER_NAT).round_().clamp_(0, MAX_CODE)
    return codes.mul_(-1 / STEPS_PER_NAT).add_(0.0)


def _in_blocks(x: Tensor, size: int, fill: float) -> Tensor:
    """x (B, V) → (B, blocks, size); the last block is filled up."""
    if x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=fill)
    return x.view(x.shape[0], -1, size)


def _rows(x: Tensor) -> Tensor:
    """(B, 1) int64 0 … B − 1, to index the first axis."""
    return torch.arange(x.shape[0], device=x.device)[:, None]


def _largest(logprobs: Tensor, count: int, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """torch.topk of (B, N); on a CPU by NumPy's vectorised partition of 64-bit keys, ties to the lower index."""
    if logprobs.is_cuda:
        return torch.topk(logprobs, count, dim=-1, sorted=ordered)
    size = logprobs.shape[-1]
    bits = logprobs.abs().numpy().view(np.int32).astype(np.int64)  # of numbers of one sign, bits sort as magnitudes
    keys = (bits << 32) | np.arange(size)
    if count < size:
        keys = np.partition(keys, count - 1, axis=-1)[:, :count]
    if ordered:
        keys.sort(axis=-1)
    values = (keys >> 32).astype(np.int32).view(np.float32)
    return torch.from_numpy(values).neg_(), torch.from_numpy(keys & 0xFFFFFFFF)
