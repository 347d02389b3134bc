"""Triton kernels that quantise weights on CUDA: the CPU path's bits, one launch for all weights of one shape.

Imported on first use on a CUDA tensor only, so that a machine without Triton can use the CPU path. Equality with the
CPU path rests on IEEE division (`div_rn`) and no fused multiply-add that is not written (`enable_fp_fusion=False`).
E4M3 and E2M1 numbers are rounded by integers, so a GPU without these types gives the same bytes. A weight is read as
16 bits: the largest of the magnitudes' bits is absmax, and a NaN, larger than any of them, stays visible.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from score_centering.precision.format import Format

# Adding and subtracting 1.5 · 2**23 rounds a float32 below 2**22 half to even.
_ROUND = tl.constexpr(12582912.0)

# From this scale up, bf16(w · (1 / scale)) equals bf16(w / scale) for all bfloat16 w and scale with |w / scale| < 512:
# a quotient of two 8-bit significands is never nearer than 2**-17 to where bfloat16 rounding changes.
_RECIPROCAL_SAFE = tl.constexpr(2.0**-100)

# Matrix scales (448 · 6 / absmax) between which `_quotient` neither underflows nor overflows.
_WHOLE_LOW, _WHOLE_HIGH = tl.constexpr(2.0**-3), tl.constexpr(2.0**60)

_ZERO_SCALE = tl.constexpr(0.0078125)  # of a channel or group of zeros: bfloat16's epsilon
_TILE = 4096  # weights a program of a kernel for groups


@triton.jit
def _weights(weights_ptr, offsets, mask):
    """The weights at `offsets` of this program's matrix: values float32, magnitudes' bits int32."""
    start = tl.load(weights_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int16))
    bits = tl.load(tl.multiple_of(start, 16) + offsets, mask=mask, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True), bits & 0x7FFF


@triton.jit
def _number(bits):
    """The float32 with a bfloat16's bits."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scale(absmax, largest: tl.constexpr):
    """bf16(absmax / largest), bfloat16's epsilon where that is 0; float32."""
    scale = tl.div_rn(absmax, largest).to(tl.bfloat16).to(tl.float32)
    return tl.where(scale == 0.0, _ZERO_SCALE, scale)


@triton.jit
def _bf16_quotient(x, scale, smallest):
    """bf16(x / scale) as float32; `smallest` of the scales tells whether a product with the reciprocal is the same."""
    scaled = x * tl.div_rn(1.0, scale) if smallest >= _RECIPROCAL_SAFE else tl.div_rn(x, scale)
    return scaled.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _quotient(x, divisor):
    """x / divisor in float32, rounded once.

    The first step gets within one unit of the last place, from where the second rounds rightly (P. Markstein,
    "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    reciprocal = tl.div_rn(1.0, divisor)
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)


@triton.jit
def _clamp(x, low: tl.constexpr, high: tl.constexpr):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _e4m3(x):
    """E4M3 codes (int32) of x float32 within ±448 that is a multiple of 2**-29, half to even.

    2**-120 · x has E4M3's exponent in float32's field, subnormal numbers included.
    """
    bits = (x * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) | ((bits >> 24) & 0x80)


@triton.jit
def _e4m3_of_any(x):
    """`_e4m3` of x from 0 to 448 with all of float32's bits: below 2**-6, E4M3's numbers are the multiples of 2**-9."""
    return _e4m3(tl.where(x < 0.015625, (x + 16384.0) - 16384.0, x))


@triton.jit
def _e2m1(x):
    """E2M1 codes (int32) of x float32 within ±6, half to the even code; −0 has code 0, as in `fp4.round_to_e2m1`."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    below = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000  # 2**22: the sum is rounded to halves
    return tl.where(size < 1.0, below, normal) | tl.where(x < 0.0, 8, 0)


@triton.jit
def _packed(codes, WORDS: tl.constexpr, EACH: tl.constexpr):
    """(WORDS,) int32: `EACH` codes of 4 bits a word, the first lowest."""
    shifts = 4 * tl.arange(0, EACH)
    return tl.sum(tl.reshape(codes, (WORDS, EACH)) << shifts[None, :], axis=1)


# ------------------------------------------------------------------------------------ a program an output channel
@triton.jit
def _channel_kernel(
    weights_ptr, codes_ptr, scale_ptr, n_out, n_in, LARGEST: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    out_row = tl.program_id(1).to(tl.int64) * n_out + row
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n_in
    weight, sizes = _weights(weights_ptr, row * n_in + offsets, mask)
    absmax = _number(tl.max(sizes, axis=0))
    scale = _scale(absmax, LARGEST)
    scaled = _bf16_quotient(weight, scale, scale)
    if KIND == "e4m3":
        codes = _e4m3(_clamp(scaled, -448.0, 448.0)).to(tl.uint8)
        tl.store(codes_ptr + out_row * n_in + offsets, codes, mask=mask)
    elif KIND == "int8":
        codes = (_clamp(scaled, -128.0, 127.0) + _ROUND) - _ROUND
        tl.store(codes_ptr + out_row * n_in + offsets, codes.to(tl.int8), mask=mask)
    else:
        codes = ((_clamp(scaled, -8.0, 7.0) + _ROUND) - _ROUND).to(tl.int32) + 8
        n_words = tl.cdiv(n_in, 8)
        words = tl.arange(0, BLOCK // 8)
        packed = _packed(tl.where(mask, codes, 0), BLOCK // 8, 8)
        tl.store(codes_ptr + out_row * n_words + words, packed, mask=words < n_words)
    tl.store(scale_ptr + out_row, scale.to(tl.bfloat16))


# ------------------------------------------------------------------------- a program a run of groups of one matrix
@triton.jit
def _group_tile(weights_ptr, numel, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """First group of this program, which of its groups there are (GROUPS,), its weights and magnitudes' bits."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    groups = first + tl.arange(0, GROUPS)
    offsets = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    weight, sizes = _weights(weights_ptr, offsets, offsets < numel)
    return groups, groups * SIZE < numel, weight, tl.max(sizes, axis=1)


@triton.jit
def _integer_kernel(weights_ptr, codes_ptr, scale_ptr, numel, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    groups, present, weight, largest = _group_tile(weights_ptr, numel, GROUPS, SIZE)
    scale = _scale(_number(largest), 7.5)
    scaled = _clamp(_bf16_quotient(weight, scale[:, None], tl.min(scale, axis=0)), -8.0, 7.0)
    codes = ((scaled + _ROUND) - _ROUND).to(tl.int32) + 8
    words = tl.program_id(0).to(tl.int64) * (GROUPS * SIZE // 8) + tl.arange(0, GROUPS * SIZE // 8)
    packed = _packed(codes, GROUPS * SIZE // 8, 8)
    tl.store(codes_ptr + matrix * (numel // 8) + words, packed, mask=words * 8 < numel)
    tl.store(scale_ptr + matrix * (numel // SIZE) + groups, scale.to(tl.bfloat16), mask=present)


@triton.jit
def _power_of_two_kernel(weights_ptr, codes_ptr, scale_ptr, numel, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    groups, present, weight, largest = _group_tile(weights_ptr, numel, GROUPS, SIZE)
    exponent = tl.maximum(((largest + 0x20) >> 7) - 8, 0)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2**(127 - exponent)
    codes = _e4m3(_clamp(weight * reciprocal[:, None], -448.0, 448.0)).to(tl.uint8)
    offsets = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(codes_ptr + matrix * numel + offsets, codes, mask=offsets < numel)
    tl.store(scale_ptr + matrix * (numel // SIZE) + groups, exponent.to(tl.uint8), mask=present)


@triton.jit
def _float_kernel(weights_ptr, codes_ptr, scale_ptr, whole_ptr, numel, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    groups, present, weight, largest = _group_tile(weights_ptr, numel, GROUPS, SIZE)
    whole = tl.load(whole_ptr + matrix)
    sixth = tl.div_rn(_number(largest), 6.0).to(tl.bfloat16).to(tl.float32)
    scale_code = _e4m3_of_any(tl.minimum(whole * sixth, 448.0))
    scale_code = tl.where(scale_code == 0, 0x20, scale_code)
    scale_code = tl.where(largest > 0x7F80, 0x7F, scale_code)
    used = (scale_code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    divisor = tl.div_rn(used, whole)[:, None]
    plain = (whole >= _WHOLE_LOW) & (whole <= _WHOLE_HIGH)
    scaled = _quotient(weight, divisor) if plain else tl.div_rn(weight, divisor)
    words = tl.program_id(0).to(tl.int64) * (GROUPS * SIZE // 2) + tl.arange(0, GROUPS * SIZE // 2)
    packed = _packed(_e2m1(_clamp(scaled, -6.0, 6.0)), GROUPS * SIZE // 2, 2)
    tl.store(codes_ptr + matrix * (numel // 2) + words, packed.to(tl.uint8), mask=words * 2 < numel)
    tl.store(scale_ptr + matrix * (numel // SIZE) + groups, scale_code.to(tl.uint8), mask=present)


@triton.jit
def _absmax_kernel(weights_ptr, largest_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, sizes = _weights(weights_ptr, offsets, offsets < numel)
    tl.atomic_max(largest_ptr + tl.program_id(1), tl.max(sizes, axis=0))


# ---------------------------------------------------------------------------------------------------------- launches
class _Batches:
    """Weights of one device by shape, with their addresses on that device."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [_aligned(weight) for weight in weights]
        self.by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, weight in enumerate(self.weights):
            self.by_shape[weight.shape[0], weight.shape[1]].append(index)
        self.device = self.weights[0].device
        self.order = [index for indices in self.by_shape.values() for index in indices]
        pointers = [self.weights[index].data_ptr() for index in self.order]
        self.pointers = torch.tensor(pointers, dtype=torch.int64).to(self.device)


def _aligned(weight: Tensor) -> Tensor:
    """The kernels read 16 bytes at once; a view into a flat buffer may start anywhere."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _raw(tensor: Tensor) -> Tensor:
    """E4M3 as its bytes: older GPUs have no such type."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _codes_and_scales(used: Format, batches: _Batches, launch: Any) -> list[tuple[Tensor, Tensor]]:
    """The two first stored tensors of each weight; `launch(n_out, n_in, start, pointers, codes, scale)` fills those of
    one shape, stacked, the first of which has number `start` in `batches.order`."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.cuda.device_of(batches.weights[0]):
        for (n_out, n_in), indices in batches.by_shape.items():
            kinds = list(used.stored(n_out, n_in).values())[:2]
            codes, scale = (
                torch.empty(len(indices), *kind.shape, dtype=kind.dtype, device=batches.device) for kind in kinds
            )
            launch(n_out, n_in, len(made), batches.pointers[len(made) :], _raw(codes), _raw(scale))
            made.update(zip(indices, zip(codes.unbind(), scale.unbind(), strict=True), strict=True))
    return [made[index] for index in range(len(batches.weights))]


def by_channel(used: Format, weights: Sequence[Tensor], kind: str, largest: float) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of a format with a scale an output channel, bf16(absmax / largest).

    Args:
        used: the format, for shapes and dtypes.
        weights: (O, I) bfloat16 each, on one device.
        kind: of the codes: `int8`, `e4m3` or `int4`, the last packed.
    """

    def launch(n_out: int, n_in: int, start: int, pointers: Tensor, codes: Tensor, scale: Tensor) -> None:
        block = max(8, triton.next_power_of_2(n_in))
        _channel_kernel[(n_out, len(codes))](
            pointers, codes, scale, n_out, n_in, LARGEST=largest, KIND=kind, BLOCK=block,
            num_warps=min(8, max(1, block // 1024)), enable_fp_fusion=False,
        )  # fmt: skip

    return _codes_and_scales(used, _Batches(weights), launch)


def by_group(used: Format, weights: Sequence[Tensor], kernel: Any, size: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of a format with a scale for each `size` input features; `kernel` is one of this module's."""

    def launch(n_out: int, n_in: int, start: int, pointers: Tensor, codes: Tensor, scale: Tensor) -> None:
        kernel[(triton.cdiv(n_out * n_in, _TILE), len(codes))](
            pointers, codes, scale, n_out * n_in, GROUPS=_TILE // size, SIZE=size, num_warps=4, enable_fp_fusion=False
        )

    return _codes_and_scales(used, _Batches(weights), launch)


def integer_groups(used: Format, weights: Sequence[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """4-bit codes, packed, and scales of groups, bf16(absmax / 7.5)."""
    return by_group(used, weights, _integer_kernel, size)


def power_of_two_groups(used: Format, weights: Sequence[Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and exponents of groups whose scale is a power of two (OCP MX)."""
    return by_group(used, weights, _power_of_two_kernel, size)


def absmax(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each weight, (len(weights),) bfloat16; NaN where a weight holds one."""
    batches, block = _Batches(weights), 16384
    largest = torch.zeros(len(weights), dtype=torch.int32, device=batches.device)
    done = 0
    with torch.cuda.device_of(batches.weights[0]):
        for (n_out, n_in), indices in batches.by_shape.items():
            grid = (triton.cdiv(n_out * n_in, block), len(indices))
            _absmax_kernel[grid](batches.pointers[done:], largest[done:], n_out * n_in, BLOCK=block, num_warps=8)
            done += len(indices)
    places = torch.tensor(batches.order, dtype=torch.int64).to(batches.device)
    return torch.empty_like(largest).index_copy_(0, places, largest).to(torch.int16).view(torch.bfloat16)


def float_groups(used: Format, weights: Sequence[Tensor], whole: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """`fp4.quantise_weight`, packed, of each weight; whole (len(weights),) float32, the matrix scale of each."""
    batches = _Batches(weights)
    ordered = whole[torch.tensor(batches.order, dtype=torch.int64).to(batches.device)]

    def launch(n_out: int, n_in: int, start: int, pointers: Tensor, codes: Tensor, scale: Tensor) -> None:
        _float_kernel[(triton.cdiv(n_out * n_in, _TILE), len(codes))](
            pointers, codes, scale, ordered[start:], n_out * n_in, GROUPS=_TILE // size, SIZE=size, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip

    return _codes_and_scales(used, batches, launch)
