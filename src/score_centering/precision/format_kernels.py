"""Triton kernels behind the functions of `int8` and `int4_kv` on CUDA: the same bits in one launch each.

Imported on first use on a CUDA tensor only, so that a machine without Triton can use the CPU path. Equality with the
CPU path rests on IEEE division (`div_rn`), no fused multiply-add (`enable_fp_fusion=False`) and additions in the same
order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Adding and subtracting 1.5 · 2**23 rounds a float32 below 2**22 half to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _has_nan(x, axis: tl.constexpr):
    """Whether x holds a NaN along `axis`; Triton's min and max skip NaN, and a fault has to stay visible."""
    return tl.max((x != x).to(tl.int32), axis=axis) == 1


@triton.jit
def _quantise_rows_kernel(x_ptr, codes_ptr, scale_ptr, n_in, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n_in
    x = tl.load(x_ptr + row * n_in + offsets, mask=mask, other=0.0).to(tl.float32)
    absmax = tl.where(_has_nan(x, 0), float("nan"), tl.max(tl.abs(x), axis=0))
    scaled = x * tl.div_rn(127.0, absmax)
    codes = (scaled + _ROUND) - _ROUND
    codes = tl.where(scaled == scaled, tl.minimum(tl.maximum(codes, -128.0), 127.0), 0.0)
    tl.store(codes_ptr + row * n_in + offsets, codes.to(tl.int8), mask=mask)
    tl.store(scale_ptr + row, tl.div_rn(absmax, 127.0))


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`int8.quantise_activation`: x (..., I) → codes (..., I) int8, scale (..., 1) float32."""
    x = x.contiguous()
    n_in = x.shape[-1]
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n_in)
    with torch.cuda.device_of(x):
        _quantise_rows_kernel[(scale.numel(),)](
            x, codes, scale, n_in, BLOCK=block, num_warps=min(8, max(1, block // 512)), enable_fp_fusion=False
        )
    return codes, scale


@triton.jit
def _scale_outputs_kernel(
    sum_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    n_rows,
    n_out,
    sum_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < n_rows)[:, None] & (columns < n_out)[None, :]
    total = tl.load(sum_ptr + rows[:, None] * sum_stride + columns[None, :], mask=mask, other=0).to(tl.float32)
    x_scale = tl.load(x_scale_ptr + rows, mask=rows < n_rows, other=0.0)
    weight_scale = tl.load(weight_scale_ptr + columns, mask=columns < n_out, other=0.0).to(tl.float32)
    out = (x_scale[:, None] * total) * weight_scale[None, :]
    tl.store(out_ptr + rows[:, None] * n_out + columns[None, :], out.to(tl.bfloat16), mask=mask)


def scale_outputs(total: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """total (N, O) int32, x_scale (N, 1) float32, weight_scale (O, 1) → (N, O) bfloat16, scaled as in `int8_linear`."""
    n_rows, n_out = total.shape
    out = torch.empty(n_rows, n_out, dtype=torch.bfloat16, device=total.device)
    rows, columns = 4, 256
    with torch.cuda.device_of(total):
        _scale_outputs_kernel[(triton.cdiv(n_rows, rows), triton.cdiv(n_out, columns))](
            total,
            x_scale,
            weight_scale,
            out,
            n_rows,
            n_out,
            total.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of x (ROWS, SIZE), pass by pass as `int4_kv._hadamard`."""
    for i in tl.static_range(LOG_SIZE):
        pairs = tl.reshape(x, (ROWS, SIZE >> (i + 1), 2, 1 << i))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (ROWS, SIZE))
    return x


@triton.jit
def _rotate_kernel(
    x_ptr, signs_ptr, out_ptr, n_rows, INVERSE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (rows < n_rows)[:, None]
    signs = tl.load(signs_ptr + tl.arange(0, SIZE))[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = _hadamard(x, ROWS, SIZE, LOG) * (signs * (1.0 / SIZE)) if INVERSE else _hadamard(x * signs, ROWS, SIZE, LOG)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


def rotate(x: Tensor, signs: Tensor, inverse: bool) -> Tensor:
    """`int4_kv.rotate` and, with `inverse`, `int4_kv.unrotate`: x (..., D), signs (D,) float32 → (..., D)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    n_rows, rows = x.numel() // size, max(1, 512 // size)
    with torch.cuda.device_of(x):
        _rotate_kernel[(triton.cdiv(n_rows, rows),)](
            x,
            signs,
            out,
            n_rows,
            INVERSE=inverse,
            ROWS=rows,
            SIZE=size,
            LOG=size.bit_length() - 1,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _encode_kernel(x_ptr, signs_ptr, packed_ptr, n_rows, ROWS: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < n_rows
    x = tl.load(x_ptr + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=mask[:, None], other=0.0)
    signs = tl.load(signs_ptr + tl.arange(0, SIZE))[None, :]
    y = _hadamard(x.to(tl.float32) * signs, ROWS, SIZE, LOG).to(x.dtype).to(tl.float32)
    low, high = tl.min(y, axis=1), tl.max(y, axis=1)
    scale = tl.maximum(tl.div_rn(high - low, 15.0), 1e-6)
    zero = tl.minimum(tl.maximum(tl.div_rn(-low, scale) + 0.5, 0.0), 15.0).to(tl.int32)
    codes = y * tl.div_rn(1.0, scale)[:, None] + zero.to(tl.float32)[:, None]
    codes = tl.minimum(tl.maximum(codes + 0.5, 0.0), 15.0).to(tl.int32)
    even, odd = tl.split(tl.reshape(codes, (ROWS, SIZE // 2, 2)))
    base = packed_ptr + rows * (SIZE // 2 + 4)
    tl.store(base[:, None] + tl.arange(0, SIZE // 2)[None, :], (even | (odd << 4)).to(tl.uint8), mask=mask[:, None])
    scale = tl.where(_has_nan(y, 1), float("nan"), scale)
    bits = (scale.to(tl.int32, bitcast=True) & -16) | zero
    tl.store((base + SIZE // 2).to(tl.pointer_type(tl.int32)), bits, mask=mask)


def encode(x: Tensor, signs: Tensor) -> Tensor:
    """`int4_kv.encode`: x (..., D), signs (D,) float32 → (..., D/2 + 4) uint8."""
    x = x.contiguous()
    size = x.shape[-1]
    packed = torch.empty((*x.shape[:-1], size // 2 + 4), dtype=torch.uint8, device=x.device)
    n_rows, rows = x.numel() // size, max(1, 512 // size)
    with torch.cuda.device_of(x):
        _encode_kernel[(triton.cdiv(n_rows, rows),)](
            x, signs, packed, n_rows, ROWS=rows, SIZE=size, LOG=size.bit_length() - 1, enable_fp_fusion=False
        )
    return packed


@triton.jit
def _decode_kernel(packed_ptr, out_ptr, n_rows, ROWS: tl.constexpr, SIZE: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < n_rows
    base = packed_ptr + rows * (SIZE // 2 + 4)
    pairs = tl.load(base[:, None] + tl.arange(0, SIZE // 2)[None, :], mask=mask[:, None], other=0).to(tl.int32)
    bits = tl.load((base + SIZE // 2).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    scale = (bits & -16).to(tl.float32, bitcast=True)[:, None, None]
    zero = (bits & 15)[:, None, None]
    codes = tl.join(pairs & 15, pairs >> 4)
    values = tl.reshape((codes - zero).to(tl.float32) * scale, (ROWS, SIZE))
    tl.store(out_ptr + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :], values, mask=mask[:, None])


def decode(packed: Tensor) -> Tensor:
    """`int4_kv.decode`: (..., D/2 + 4) uint8 → (..., D) float32 in the rotated space."""
    packed = packed.contiguous()
    size = 2 * (packed.shape[-1] - 4)
    out = torch.empty((*packed.shape[:-1], size), dtype=torch.float32, device=packed.device)
    n_rows, rows = packed.numel() // packed.shape[-1], max(1, 2048 // size)
    with torch.cuda.device_of(packed):
        _decode_kernel[(triton.cdiv(n_rows, rows),)](packed, out, n_rows, ROWS=rows, SIZE=size)
    return out
