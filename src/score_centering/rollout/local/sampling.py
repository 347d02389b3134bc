"""Choosing the next token, and recording the probabilities it was chosen with, in one call.

Every rollout has its own stream of uniform numbers, a hash of (seed, prompt index, sample index, position), so a token
never depends on what shares its batch, on the device, or on the order of the work.
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CDF_BLOCK = 256
_HEAD_BLOCK = 64


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64 with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, prompt_index: np.ndarray, sample_index: np.ndarray, positions: int) -> np.ndarray:
    """Uniform numbers in [0, 1), one a position: indices (N,) int64 → (N, positions) float64 with 52 random bits."""
    key = np.full(len(prompt_index), seed % 2**64, dtype=np.uint64)
    for counter in (prompt_index, sample_index):
        key = _mix(key + _GOLDEN) ^ _mix(counter.astype(np.uint64) + np.uint64(1))
    steps = np.arange(1, positions + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(_mix(key[:, None] + _GOLDEN) + steps[None, :])
    return (bits >> np.uint64(12)) * 2.0**-52


def log_probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-softmax of logits (B, V) bfloat16 / temperature (), over the whole vocabulary, in FP32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: logprobs (B, V) float32, uniform (B,) float64 in [0, 1) → token ids (B,) int64.

    The cumulative sum runs in float64 over blocks of the vocabulary, then inside the block that is hit, so no token of
    probability 0 is ever drawn and rounding does not favour any part of the vocabulary.
    """
    batch, vocab = logprobs.shape
    probs = torch.nn.functional.pad(logprobs.exp(), (0, -vocab % _CDF_BLOCK)).view(batch, -1, _CDF_BLOCK)
    cdf = probs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # (B, blocks)
    target = uniform[:, None] * cdf[:, -1:]
    block = (cdf <= target).sum(dim=-1, keepdim=True)
    before = torch.nn.functional.pad(cdf, (1, 0)).gather(1, block)
    inside = probs.gather(1, block[..., None].expand(-1, -1, _CDF_BLOCK)).squeeze(1).double().cumsum(dim=-1)
    target = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-52))
    return block.squeeze(1) * _CDF_BLOCK + (inside <= target).sum(dim=-1)


def head(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens of each row: logprobs (B, V) → log-probs (B, K) descending, ids (B, K) int64.

    Over a large vocabulary: the K largest values lie in the K blocks with the largest maxima.
    """
    batch, vocab = logprobs.shape
    if count * _HEAD_BLOCK * 2 > vocab:
        return torch.topk(logprobs, count, dim=-1)
    blocks = torch.nn.functional.pad(logprobs, (0, -vocab % _HEAD_BLOCK), value=-torch.inf)
    blocks = blocks.view(batch, -1, _HEAD_BLOCK)
    chosen = torch.topk(blocks.amax(dim=-1), count, dim=-1).indices  # (B, K)
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, _HEAD_BLOCK)).flatten(1)
    values, index = torch.topk(values, count, dim=-1)
    ids = chosen.gather(1, index // _HEAD_BLOCK) * _HEAD_BLOCK + index % _HEAD_BLOCK
    return values, ids
