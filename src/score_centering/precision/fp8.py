"""FP8 linear layers (llm-compressor's FP8_DYNAMIC): E4M3 weights per output channel, E4M3 activations per token.

Activations are those of vLLM 0.25.0's `dynamic_per_token_scaled_fp8_quant`, weights those of compressed-tensors. An
E4M3 number has 4 significant bits, so BF16 and FP32 hold it exactly: products of codes are exact, sums are FP32's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, on_cuda, product

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1 / (LARGEST * 512)  # vLLM's: a row of zeros has this one


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations x (..., I) → codes (..., I) float32 that are E4M3 numbers, scale (..., 1) float32.

    scale = max(absmax / 448, 1 / (448 · 512)), code = e4m3(clamp(x / scale, −448, 448)), half to even, all in FP32.
    A row with a NaN has a NaN scale.
    """
    x = x.float()
    absmax = x.abs().amax(dim=-1, keepdim=True)
    # Tensor by tensor: CUDA multiplies by the reciprocal of a Python number.
    scale = torch.div(absmax, torch.full_like(absmax, LARGEST)).clamp(min=SMALLEST_SCALE)
    return (x / scale).clamp_(-LARGEST, LARGEST).to(E4M3).float(), scale


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (O, I) bfloat16 → codes (O, I) float8_e4m3fn, scale (O, 1) bfloat16, every step in BF16.

    scale = absmax / 448 (2**-7 where that is 0), code = e4m3(clamp(bf16(w / scale), −448, 448)); −0 becomes 0.
    """
    absmax = weight.abs().amax(dim=1, keepdim=True)
    scale = torch.div(absmax, torch.full_like(absmax, LARGEST))
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    return (weight / scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale


SCHEME = {
    "weights": {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
        "group_size": None,
    },
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
}  # fmt: skip


class Fp8(Format):
    name, compressor, parts = "fp8", "float-quantized", ("weight", "weight_scale")
    scheme = SCHEME
    weight_error = (0.02, 0.035)
    has_scale = True

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        return {"weight": Kind((n_out, n_in), E4M3), "weight_scale": Kind((n_out, 1), torch.bfloat16)}

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        if not on_cuda(weights):
            return [quantise_weight(weight) for weight in weights.values()]
        from score_centering.precision import weight_kernels

        return weight_kernels.by_channel(self, list(weights.values()), "e4m3", LARGEST)

    def hold(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return stored["weight"].to(torch.bfloat16), stored["weight_scale"].float()

    def dequantise(self, stored: Stored) -> Tensor:
        return stored["weight"].double() * stored["weight_scale"].double()

    def quantise_input(self, x: Tensor) -> Tensor:
        codes, scale = quantise_rows(x)
        return codes.double() * scale.double()

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        """In FP32 (sum of products · weight scale) · activation scale, then BF16: vLLM's CUTLASS epilogue."""
        rows = x.reshape(-1, x.shape[-1])
        codes, row_scale = quantise_rows(rows)
        total = product(codes.to(values.dtype), values)
        return total.mul_(scale.t()).mul_(row_scale).to(torch.bfloat16).reshape(*x.shape[:-1], -1)


FORMAT = Fp8()
