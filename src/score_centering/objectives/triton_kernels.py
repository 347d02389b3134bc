"""The elementwise passes as Triton kernels: each reads its tensor once. Imported on CUDA only."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 4


@triton.jit
def _row_statistics_kernel(logits, normaliser, entropy, row_stride, columns, inverse_temperature, BLOCK: tl.constexpr):
    """One program a row: running maximum m, Σ exp(z − m) and Σ exp(z − m)·(z − m), float32."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    maximum = -1.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        z = tl.load(logits + row * row_stride + start + lanes, mask=inside, other=float("-inf")) * inverse_temperature
        larger = tl.maximum(maximum, tl.max(z, 0))
        shift = maximum - larger
        rescale = tl.exp(shift)
        e = tl.exp(z - larger)
        weighted = rescale * (weighted + total * shift) + tl.sum(tl.where(e > 0, e * (z - larger), 0.0), 0)
        total = rescale * total + tl.sum(e, 0)
        maximum = larger
    log_total = tl.log(total)
    tl.store(normaliser + row, maximum + log_total)
    tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def _softmax_times_kernel(
    logits, normaliser, factor, out, row_stride, out_stride, columns, inverse_temperature, BLOCK: tl.constexpr
):
    """One program a row and block of columns: out = factor·exp(z − normaliser), rounded once to the dtype of `out`."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < columns
    z = tl.load(logits + row * row_stride + lanes, mask=inside, other=0.0) * inverse_temperature
    value = tl.load(factor + row) * tl.exp(z - tl.load(normaliser + row))
    tl.store(out + row * out_stride + lanes, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(values, factor, elements, BLOCK: tl.constexpr):
    """values *= factor; a factor of 1 returns at once and touches nothing."""
    scale = tl.load(factor)
    if scale != 1.0:
        lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < elements
        value = tl.load(values + lanes, mask=inside)
        tl.store(values + lanes, (value * scale).to(values.dtype.element_ty), mask=inside)


def row_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As `loss.row_statistics`, for logits (C, V) float32 with contiguous rows. Returns (C,), (C,) float32."""
    rows, columns = logits.shape
    normaliser, entropy = logits.new_empty(2, rows).unbind(0)
    _row_statistics_kernel[(rows,)](
        logits, normaliser, entropy, logits.stride(0), columns, 1 / temperature, BLOCK=BLOCK, num_warps=WARPS
    )
    return normaliser, entropy


def softmax_times(logits: Tensor, normaliser: Tensor, factor: Tensor, temperature: float, out: Tensor) -> None:
    """As `loss.softmax_times`, for logits (C, V) float32 and out (C, V) of any floating dtype, with contiguous rows."""
    rows, columns = logits.shape
    _softmax_times_kernel[(rows, triton.cdiv(columns, BLOCK))](
        logits,
        normaliser,
        factor,
        out,
        logits.stride(0),
        out.stride(0),
        columns,
        1 / temperature,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def scale(values: Tensor, factor: Tensor) -> None:
    """values *= factor in place, for a contiguous tensor and a float32 scalar on its device; a factor of 1 is free."""
    elements = values.numel()
    _scale_kernel[(triton.cdiv(elements, BLOCK),)](values, factor, elements, BLOCK=BLOCK, num_warps=WARPS)
