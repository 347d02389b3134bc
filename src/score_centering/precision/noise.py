"""Relative noise on an engine's weights: a mismatch of known size, for studies only."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

SPARED = ("embed_tokens", "lm_head")
VOCABULARY = "vocabulary"  # under which both draw their ε


class WeightNoise:
    """w → w·(1 + relative·ε) for every matrix but embedding and LM head, ε standard normal and the same at every call.

    Args:
        relative: standard deviation of the relative change.
        embedding: embedding and LM head too; the same ε on both, which may be one matrix.
        seed: which ε, together with the name of the matrix; drawn on the CPU, so equal on every device.
    """

    def __init__(self, relative: float, seed: int, embedding: bool = False) -> None:
        self._relative, self._seed, self._embedding = relative, seed, embedding
        self._factors: dict[str, Tensor] = {}

    def apply(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights with their noise, each in its dtype; others pass through as the same tensor."""
        return {
            name: (tensor * self._factor(name, tensor)).to(tensor.dtype) if self._is_noisy(name, tensor) else tensor
            for name, tensor in weights.items()
        }

    def _is_noisy(self, name: str, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and (self._embedding or not any(part in name for part in SPARED))

    def _factor(self, name: str, tensor: Tensor) -> Tensor:
        key = VOCABULARY if any(part in name for part in SPARED) else name
        if key not in self._factors:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {key}".encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            self._factors[key] = noise.mul_(self._relative).add_(1.0).to(tensor.device)
        return self._factors[key]
