"""vLLM 0.25.0's `int4_per_token_head` KV cache: sign flip, Hadamard rotation, asymmetric 4-bit codes, inline scale.

K and V are coded apart, per token and KV head, K after RoPE. One coded vector of head size D is D/2 + 4 bytes: two
codes a byte (even index in the low nibble), then a little-endian FP32 scale that holds the zero point in its 4 low
mantissa bits.
Every function works on the last axis and on any leading shape, on CPU and CUDA, and never waits for the device.

Attention runs in the rotated space: with q' = rotate(q), scores are q'·k' / D, and unrotate() takes the weighted sum
of v' back. vLLM keeps q', and the sum before unrotate(), in BF16.
"""

import functools

import torch
from torch import Tensor

_SIGN_SEED = 0x9E3779B9
_SCALE_BYTES = 4
_ZERO_BITS = 0xF


def check_head_size(head_size: int) -> None:
    """Raise ValueError unless the format can hold this head size."""
    if head_size < 8 or head_size & (head_size - 1):
        raise ValueError(f"INT4 KV cache: head size {head_size}, allowed: powers of two from 8 on")


def packed_bytes(head_size: int) -> int:
    """Bytes of one coded vector (K or V of one token and KV head): 132 at head size 256, 264 for K and V together."""
    check_head_size(head_size)
    return head_size // 2 + _SCALE_BYTES


@functools.lru_cache
def _signs(head_size: int, device: torch.device) -> Tensor:
    """The fixed ±1 vector (D,) float32 of the rotation, drawn on the CPU so that it is the same on every device."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    half = torch.full((head_size,), 0.5)
    return (2.0 * torch.bernoulli(half, generator=generator) - 1.0).to(device)


def _hadamard(x: Tensor) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of the last axis, as log2(D) add-and-subtract passes in x's dtype.

    The passes run on the transposed array (D, N), whose inner loops are long and contiguous at every width.
    """
    size = x.shape[-1]
    columns = x.reshape(-1, size).t().contiguous()
    result = torch.empty_like(columns)
    width = 1
    while width < size:
        low, high = columns.view(size // (2 * width), 2, -1).unbind(1)
        into_low, into_high = result.view(size // (2 * width), 2, -1).unbind(1)
        torch.add(low, high, out=into_low)
        torch.sub(low, high, out=into_high)
        columns, result = result, columns
        width *= 2
    return columns.t().reshape(x.shape)


def rotate(x: Tensor) -> Tensor:
    """Sign flip, then unnormalised Hadamard rotation in FP32, rounded back to x's dtype; x (..., D)."""
    check_head_size(x.shape[-1])
    signs = _signs(x.shape[-1], x.device)
    if x.is_cuda:
        from score_centering.precision import format_kernels

        return format_kernels.rotate(x, signs, inverse=False)
    return _hadamard(x.float() * signs).to(x.dtype)


def unrotate(x: Tensor) -> Tensor:
    """Inverse of `rotate` for an x (..., D) of the rotated space: Hadamard, sign flip, division by D."""
    check_head_size(x.shape[-1])
    signs = _signs(x.shape[-1], x.device)
    if x.is_cuda:
        from score_centering.precision import format_kernels

        return format_kernels.rotate(x, signs, inverse=True)
    return (_hadamard(x.float()) * (signs / x.shape[-1])).to(x.dtype)


def quantise(rotated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric 4-bit codes of rotated (..., D) vectors → codes (..., D) uint8, scale (...) float32, zero (...) int32.

    scale = max((max − min) / 15, 1e-6), zero = clamp(round(−min / scale), 0, 15),
    code = clamp(round(y · (1 / scale) + zero), 0, 15), rounding half away from zero (adding 0.5 and truncating).
    """
    y = rotated.float()
    low, high = y.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15.0).clamp_(min=1e-6)
    zero = _round_to_nibble(-low / scale)
    codes = _round_to_nibble(y * (1.0 / scale) + zero)
    return codes.to(torch.uint8), scale.squeeze(-1), zero.squeeze(-1).to(torch.int32)


def _round_to_nibble(y: Tensor) -> Tensor:
    """Round half away from zero and clamp to 0…15; what is negative ends at 0 either way."""
    return (y + 0.5).clamp_(0.0, 15.0).trunc_()


def pack(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """codes (..., D) uint8 below 16, scale (...) float32, zero (...) int32 below 16 → bytes (..., D/2 + 4) uint8.

    The scale loses its 4 low mantissa bits to the zero point.
    """
    check_head_size(codes.shape[-1])
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    bits = (scale.contiguous().view(torch.int32) & ~_ZERO_BITS) | zero
    return torch.cat((even | (odd << 4), bits.unsqueeze(-1).view(torch.uint8)), dim=-1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undoes `pack`: packed (..., D/2 + 4) uint8 → codes (..., D) uint8, scale (...) with 4 low bits 0, zero (...)."""
    even, odd, scale, zero = unpack_streams(packed)
    return torch.stack((even, odd), dim=-1).flatten(-2), scale, zero


def unpack_streams(packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `unpack` of packed (..., D/2 + 4) uint8; the codes of even and of odd indices apart, (..., D/2) uint8 each."""
    half = packed.shape[-1] - _SCALE_BYTES
    check_head_size(2 * half)
    codes = packed[..., :half]
    return codes & 0xF, codes >> 4, *unpack_scale(packed)


def unpack_scale(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed (..., D/2 + 4) uint8 → scale (...) float32 with 4 low bits 0, zero point (...) int32."""
    bits = packed[..., -_SCALE_BYTES:].view(torch.int32).squeeze(-1)
    return (bits & ~_ZERO_BITS).view(torch.float32), bits & _ZERO_BITS


def encode(x: Tensor) -> Tensor:
    """Rotate, quantise and pack: x (..., D) → (..., D/2 + 4) uint8: what is written into the cache."""
    if x.is_cuda:
        from score_centering.precision import format_kernels

        check_head_size(x.shape[-1])
        return format_kernels.encode(x, _signs(x.shape[-1], x.device))
    return pack(*quantise(rotate(x)))


def decode(packed: Tensor) -> Tensor:
    """packed (..., D/2 + 4) uint8 → vectors (..., D) float32 in the rotated space: (code − zero) · scale."""
    if packed.is_cuda:
        from score_centering.precision import format_kernels

        return format_kernels.decode(packed)
    codes, scale, zero = unpack(packed)
    return (codes - zero.float().unsqueeze(-1)) * scale.unsqueeze(-1)
