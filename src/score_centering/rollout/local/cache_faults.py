"""Damages entries of the INT4 cache as they are written: a controlled engine fault, for studies only.

An entry is the coded key or value of one token and KV head. Whether it is damaged, and how, is a hash of (key, rollout,
layer, head, position), so a fault depends on nothing that shares the batch. The key changes with every call (a
transient fault, such as a race) or never (a persistent one).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from score_centering.precision import int4_kv

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_SCALE_SHIFT = 8  # a damaged scale is multiplied by 2^e, e from −8 to 8


@dataclass
class CacheFaults:
    """Which entries are damaged, and how.

    Args:
        rate: probability that an entry is damaged.
        kind: "codes" replaces all 4-bit codes by random ones, "scale" multiplies the scale by 2^-8 … 2^8, "nan" makes
            it NaN.
        transient: other entries in every call; else the same entries in each.
        seed: which entries.
    """

    rate: float
    kind: Literal["codes", "scale", "nan"]
    transient: bool
    seed: int
    _key: Tensor | None = None  # () int64, on the engine's device
    _calls: Counter[tuple[int, int]] = field(default_factory=Counter)
    _step: int | None = None

    def begin(self, step: int, request: int, device: torch.device) -> None:
        """A call of the engine starts, with the weights of `step`; `request` is a number that equal calls share.

        Equal calls since the last weights are counted, so a run that resumes after `step` meets the same faults.
        """
        if step != self._step:
            self._calls.clear()
            self._step = step
        self._calls[step, request] += 1
        words = [self.seed, *([step, request, self._calls[step, request]] if self.transient else [])]
        key = torch.zeros((), dtype=torch.int64)
        for word in words:
            key = _mix(key * _GOLDEN + word)
        if self._key is None:
            self._key = torch.zeros((), dtype=torch.int64, device=device)
        self._key.copy_(key)  # in place: a CUDA graph reads it

    def damage(self, packed: Tensor, owner: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Entries as they reach the cache: packed (B, M, C, D/2 + 4) uint8, the same back.

        Args:
            owner: (B,) int64, what tells the rows apart whatever their place in the batch.
            positions: (B, C) int64.
        """
        heads = torch.arange(packed.shape[1], device=packed.device) + layer * packed.shape[1]
        bits = _mix(self._key + _mix(owner * _GOLDEN + 1))
        bits = _mix(bits[:, None] + positions * _GOLDEN)
        bits = _mix(bits[:, None] + (heads * _GOLDEN)[:, None])  # (B, M, C)
        hit = _shift(bits, 11).double() * 2.0**-53 < self.rate
        codes, scale, zero = int4_kv.unpack(packed)
        if self.kind == "codes":
            dims = torch.arange(codes.shape[-1], device=packed.device)
            codes = (_mix(bits[..., None] + dims * _GOLDEN) & 0xF).to(torch.uint8)
        elif self.kind == "scale":
            exponent = _shift(_mix(bits), 11) % (2 * _SCALE_SHIFT + 1) - _SCALE_SHIFT
            scale = torch.ldexp(scale, exponent)
        else:
            scale = torch.full_like(scale, torch.nan)
        return torch.where(hit[..., None], int4_kv.pack(codes, scale, zero), packed)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, as in `sampling`, on int64 tensors (products wrap)."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)
