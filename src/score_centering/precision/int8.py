"""INT8 numbers as vLLM 0.25.0 computes with them: per-token activations, per-output-channel weights, a W8A8 linear.

Axis letters: N rows (tokens), I input features, O output features.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, check_matrices

# A sum of 1024 products of INT8 codes stays below 127 * 128 * 1024 < 2**24, so FP32 adds them without rounding.
EXACT_BLOCK = 1024

# With AVX-512 VNNI (and AMX) torch's product of INT8 codes is exact and faster than FP32 GEMMs; with AVX2 it is slower
# by a factor of 17 (docs/results/engine).
INT8_PRODUCT = torch.cpu._is_vnni_supported()

# Elements of the FP32 copy of a weight block, small enough to stay in a core's cache between cast and GEMM.
_CACHE_ELEMENTS = 1 << 18


def quantise_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of activations: symmetric, scale = absmax / 127, code = rint(x * (127 / absmax)).

    x (..., I) bfloat16, float16 or float32. Returns codes (..., I) int8 and scale (..., 1) float32.
    Rounds half to even, multiplies by the reciprocal as vLLM's `dynamic_scaled_int8_quant` does. A zero row has scale 0
    and codes 0; a row with a NaN has scale NaN, so that the fault stays visible.
    """
    if x.is_cuda:
        from score_centering.precision import format_kernels

        return format_kernels.quantise_rows(x)
    codes, scale = _quantise_activation_f32(x)
    return codes.to(torch.int8), scale


def _quantise_activation_f32(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_activation` with the codes left in float32, for a GEMM that reads float32."""
    x = x.float()
    absmax = x.abs().amax(dim=-1, keepdim=True)
    scaled = x * torch.div(torch.tensor(127.0), absmax)  # `127.0 / absmax` would multiply by the reciprocal
    # 0 · inf of a zero row is 0; a row below 127 / FLT_MAX overflows to ±inf and saturates, as CUDA's conversion does.
    codes = torch.nan_to_num_(scaled.round_(), nan=0.0, posinf=127.0, neginf=-128.0)
    return codes, absmax / 127.0


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each output channel as compressed-tensors does on a CPU, every step in BF16.

    weight (O, I) bfloat16. Returns codes (O, I) int8 and scale (O, 1) bfloat16:
    scale = absmax / 127.5 (2**-7 where that is 0), code = rint(clamp(bf16(w / scale), -128, 127)).
    A channel with a NaN or an infinite weight has a scale that is not finite.
    """
    check_matrices({"INT8": weight})
    return quantise_weights([weight])[0]


def quantise_weights(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`quantise_weight` of each weight; all lie on one device."""
    if weights and weights[0].is_cuda:
        from score_centering.precision import weight_kernels

        return weight_kernels.by_channel(FORMAT, weights, "int8", 127.5)
    return [_quantise_weight_cpu(weight) for weight in weights]


def _quantise_weight_cpu(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127.5
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    return (weight / scale).clamp_(-128, 127).round_().to(torch.int8), scale


def dequantise_weight(codes: Tensor, scale: Tensor) -> Tensor:
    """codes (O, I) int8, scale (O, 1) bfloat16 → bfloat16 weight as compressed-tensors decompresses it."""
    return codes.to(scale.dtype) * scale


def int8_matmul(x_codes: Tensor, weight_codes: Tensor) -> Tensor:
    """Exact integer product x_codes (N, I) · weight_codes (O, I)ᵀ, rounded once to float32: (N, O).

    On a CPU x_codes may hold the codes in float32; on CUDA both are int8 and the sum is the INT32 of the tensor cores.
    """
    if weight_codes.is_cuda:
        return _int8_matmul_cuda(x_codes, weight_codes).float()
    return _int8_matmul_cpu(x_codes, weight_codes)


def _int8_matmul_cpu(x_codes: Tensor, weight_codes: Tensor) -> Tensor:
    """x_codes (N, I) int8 or float32, weight_codes (O, I) int8 → (N, O) float32.

    torch's INT8 product where the CPU has one. Else FP32 GEMMs on integer codes, exact within EXACT_BLOCK input
    features; longer rows are summed in float64.
    """
    if INT8_PRODUCT:
        x_codes = x_codes.to(torch.int8)
        if x_codes.shape[1] == 1:  # with AMX, torch's product of a single column is wrong; a column of zeros adds none
            x_codes, weight_codes = (torch.nn.functional.pad(codes, (0, 1)) for codes in (x_codes, weight_codes))
        return torch._int_mm(x_codes, weight_codes.T).float()
    x_codes = x_codes.float()
    n_out, n_in = weight_codes.shape
    if n_in > EXACT_BLOCK:
        total = torch.zeros(x_codes.shape[0], n_out, dtype=torch.float64)
        for lo in range(0, n_in, EXACT_BLOCK):
            block = slice(lo, lo + EXACT_BLOCK)
            total += _int8_matmul_cpu(x_codes[:, block], weight_codes[:, block])
        return total.float()
    rows = max(1, _CACHE_ELEMENTS // n_in)
    if n_out <= rows:
        return x_codes @ weight_codes.float().T
    out = torch.empty(x_codes.shape[0], n_out)
    for lo in range(0, n_out, rows):
        out[:, lo : lo + rows] = x_codes @ weight_codes[lo : lo + rows].float().T
    return out


def _int8_matmul_cuda(x_codes: Tensor, weight_codes: Tensor) -> Tensor:
    """torch._int_mm takes more than 16 rows and multiples of 8; zero padding does not change a sum."""
    n_rows, n_in = x_codes.shape
    n_out = weight_codes.shape[0]
    pad_rows, pad_in, pad_out = max(0, 17 - n_rows), -n_in % 8, -n_out % 8
    if pad_in or pad_rows:
        x_codes = torch.nn.functional.pad(x_codes, (0, pad_in, 0, pad_rows))
    if pad_in or pad_out:
        weight_codes = torch.nn.functional.pad(weight_codes, (0, pad_in, 0, pad_out))
    return torch._int_mm(x_codes, weight_codes.T)[:n_rows, :n_out]


def int8_linear(x: Tensor, weight_codes: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A8 linear: x (..., I) bfloat16, weight_codes (O, I) int8, weight_scale (O, 1) bfloat16 or float32, bias (O,).

    Dynamic per-token codes, INT32 accumulation, then in FP32 (x_scale * sum) * weight_scale, cast to BF16, then bias:
    the order of vLLM's `triton_scaled_mm`. Returns (..., O) bfloat16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from score_centering.precision import format_kernels

        codes, scale = format_kernels.quantise_rows(rows)
        out = format_kernels.scale_outputs(_int8_matmul_cuda(codes, weight_codes), scale, weight_scale)
    else:
        codes, scale = _quantise_activation_f32(rows)
        out = (_int8_matmul_cpu(codes, weight_codes).mul_(scale)).mul_(weight_scale.float().T).to(torch.bfloat16)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], -1)


SCHEME = {
    "weights": {
        "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False,
        "group_size": None,
    },
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
}  # fmt: skip


class Int8(Format):
    """W8A8: one BF16 scale an output channel, one FP32 scale a token."""

    name, compressor, parts = "int8", "int-quantized", ("weight", "weight_scale")
    scheme = SCHEME
    weight_error = (0.004, 0.02)
    has_scale = True
    linear_backend = "triton"

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        return {"weight": Kind((n_out, n_in), torch.int8), "weight_scale": Kind((n_out, 1), torch.bfloat16)}

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return quantise_weights(list(weights.values()))

    def hold(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return stored["weight"], stored["weight_scale"].float()

    def dequantise(self, stored: Stored) -> Tensor:
        return stored["weight"].double() * stored["weight_scale"].double()

    def quantise_input(self, x: Tensor) -> Tensor:
        codes, scale = quantise_activation(x)
        return codes.double() * scale.double()

    def held_dtype(self, device: torch.device) -> torch.dtype:
        return torch.int8

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        return int8_linear(x, values, scale)


FORMAT = Int8()
