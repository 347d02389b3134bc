"""Decoding attention over the packed INT4 cache as one Triton launch; imported on first use on a CUDA tensor only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_POSITIONS = 64  # cache positions of one tile


@triton.jit
def _codes_and_scales(vector_ptr, transposed: tl.constexpr, mask, HALF: tl.constexpr):
    """Even codes, odd codes (uint8), scale (float32) and zero point (float32) of the coded vectors at `vector_ptr`."""
    dims = tl.arange(0, HALF)
    if transposed:
        packed = tl.load(vector_ptr[None, :] + dims[:, None], mask=mask[None, :], other=0)
    else:
        packed = tl.load(vector_ptr[:, None] + dims[None, :], mask=mask[:, None], other=0)
    bits = tl.load((vector_ptr + HALF).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    return packed & 0xF, packed >> 4, (bits & -16).to(tl.float32, bitcast=True), (bits & 0xF).to(tl.float32)


@triton.jit
def _attend_packed_kernel(
    query_ptr,
    kv_ptr,
    position_ptr,
    out_ptr,
    scale,
    positions,
    kv_heads,
    groups,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(position_ptr + batch).to(tl.int32) + 1
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HALF)
    offsets = ((batch * kv_heads + head) * groups + rows)[:, None] * (2 * HALF) + 2 * dims[None, :]
    row_mask = (rows < groups)[:, None]
    even = tl.load(query_ptr + offsets, mask=row_mask, other=0.0)
    odd = tl.load(query_ptr + offsets + 1, mask=row_mask, other=0.0)
    query_sum = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
    key_ptr = kv_ptr + (batch * 2 * kv_heads + head) * positions * (HALF + 4)
    value_ptr = kv_ptr + (batch * 2 * kv_heads + kv_heads + head) * positions * (HALF + 4)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum_even = tl.zeros((ROWS, HALF), tl.float32)
    sum_odd = tl.zeros((ROWS, HALF), tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < length
        low, high, key_scale, key_zero = _codes_and_scales(key_ptr + at * (HALF + 4), True, mask, HALF)
        raw = tl.dot(even, low.to(tl.bfloat16)) + tl.dot(odd, high.to(tl.bfloat16))
        scores = (raw - query_sum[:, None] * key_zero[None, :]) * (scale * key_scale)[None, :]
        scores = tl.where(mask[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay, weight = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
        total = total * decay + tl.sum(weight, 1)
        low, high, value_scale, value_zero = _codes_and_scales(value_ptr + at * (HALF + 4), False, mask, HALF)
        weight = weight * value_scale[None, :]
        zero = tl.sum(weight * value_zero[None, :], 1)[:, None]
        sum_even = sum_even * decay[:, None] + tl.dot(weight, low.to(tl.float32), input_precision="ieee") - zero
        sum_odd = sum_odd * decay[:, None] + tl.dot(weight, high.to(tl.float32), input_precision="ieee") - zero
        top = new_top
    tl.store(out_ptr + offsets, (sum_even / total[:, None]).to(tl.bfloat16), mask=row_mask)
    tl.store(out_ptr + offsets + 1, (sum_odd / total[:, None]).to(tl.bfloat16), mask=row_mask)


def attend_packed(query: Tensor, kv: Tensor, scale: float, positions: Tensor) -> Tensor:
    """`forward._attend_packed` for one token a row, which reads the cache up to its own position only.

    query (B, Hkv, G, D) bfloat16, kv (B, 2·Hkv, S, D/2 + 4) uint8, positions (B, 1) int64 → (B, Hkv, G, D) bfloat16.
    """
    query = query.contiguous()
    batch, kv_heads, groups, size = query.shape
    out = torch.empty_like(query)
    with torch.cuda.device_of(query):
        _attend_packed_kernel[(batch, kv_heads)](
            query,
            kv,
            positions,
            out,
            scale,
            kv.shape[2],
            kv_heads,
            groups,
            HALF=size // 2,
            ROWS=max(16, triton.next_power_of_2(groups)),
            BLOCK=_POSITIONS,
        )
    return out
