"""The KV caches of vLLM 0.25.0 by its names: what an entry is, and what attention reads back.

An entry is the stored key or value of one token and KV head, K after RoPE. A cache tensor's dtype tells its format.
`int4_per_token_head` has arithmetic of its own (`int4_kv`); the others multiply BF16 numbers: queries, entries and
probabilities as below, summed in FP32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from score_centering.precision import int4_kv
from score_centering.precision.fp8 import E4M3, LARGEST

_SCALE_BYTES = 4
_SMALLEST_SCALE = 1e-6


@dataclass(frozen=True)
class CacheFormat:
    """One cache format.

    name: vLLM's `kv_cache_dtype`.
    dtype: of the cache tensor.
    extra: elements of an entry beside those of the head (D of them, D / 2 where codes are packed).
    encode: vectors (..., D) bfloat16 → entries (..., ·).
    decode: entries → vectors (..., D) as attention sees them, in float32; in the rotated space of `int4_kv` for INT4.
    narrow: queries (..., D) bfloat16 and probabilities float32, as they reach a product, in bfloat16.
    """

    name: str
    dtype: torch.dtype
    extra: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    narrow: Callable[[Tensor], Tensor]

    @property
    def rotated(self) -> bool:
        """Whether entries lie in the rotated space of `int4_kv`, with attention of its own."""
        return self.dtype == torch.uint8

    def entry_size(self, head_size: int) -> int:
        """Elements of one entry.

        Raises:
            ValueError: the format can't hold this head size.
        """
        return int4_kv.packed_bytes(head_size) if self.rotated else head_size + self.extra

    def read(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the products see: (..., D) bfloat16, and a scale (...) float32 that is applied apart, or None."""
        if self.dtype == torch.int8:
            return entries[..., :-_SCALE_BYTES].to(torch.bfloat16), _scale(entries)
        return entries.to(torch.bfloat16), None

    def original(self, entries: Tensor) -> Tensor:
        """The vectors (..., D) float32 that the entries stand for."""
        return int4_kv.unrotate(self.decode(entries)) if self.rotated else self.decode(entries)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def _e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 numbers, saturating, scale 1: an uncalibrated checkpoint has no other."""
    return x.float().clamp(-LARGEST, LARGEST).to(E4M3)


def _narrow_to_e4m3(x: Tensor) -> Tensor:
    return _e4m3(x).to(torch.bfloat16)


def encode_int8(x: Tensor) -> Tensor:
    """x (..., D) bfloat16 → (..., D + 4) int8: codes, then the FP32 scale.

    scale = max(absmax / 127, 1e-6), code = trunc(clamp(x · (1 / scale) ± 0.5, −128, 127)): half away from zero.
    """
    x = x.float()
    absmax = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.div(absmax, torch.full_like(absmax, 127.0)).clamp(min=_SMALLEST_SCALE)
    scaled = x * (1.0 / scale)
    codes = (scaled + torch.where(scaled >= 0, 0.5, -0.5)).clamp(-128, 127).trunc().to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), dim=-1)


def _scale(entries: Tensor) -> Tensor:
    return entries[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32).squeeze(-1)


def decode_int8(entries: Tensor) -> Tensor:
    """entries (..., D + 4) int8 → (..., D) float32."""
    return entries[..., :-_SCALE_BYTES].float() * _scale(entries).unsqueeze(-1)


def _as_stored(x: Tensor) -> Tensor:
    return x


def _float(x: Tensor) -> Tensor:
    return x.float()


BF16 = CacheFormat("auto", torch.bfloat16, 0, _as_stored, _float, _bf16)
INT4 = CacheFormat("int4_per_token_head", torch.uint8, _SCALE_BYTES, int4_kv.encode, int4_kv.decode, _bf16)
INT8 = CacheFormat("int8_per_token_head", torch.int8, _SCALE_BYTES, encode_int8, decode_int8, _bf16)
FP8 = CacheFormat("fp8", E4M3, 0, _e4m3, _float, _narrow_to_e4m3)
"""Scale 1; vLLM's Triton attention also casts queries and unnormalised probabilities to E4M3."""
_OF_DTYPE = {cache.dtype: cache for cache in (BF16, INT4, INT8, FP8)}


def cache_of(kv: Tensor) -> CacheFormat:
    """The format of a cache tensor kv (..., E), E entries a token and head."""
    return _OF_DTYPE[kv.dtype]
