"""MXFP8 linear layers: E4M3 weights and activations with a power of two for each 32 input features (OCP MX).

Weights and activations are compressed-tensors' (llm-compressor's MXFP8). An E4M3 number times a power of two is a BF16
number, so the product of the decoded operands is that of the block-scaled tensor cores up to the order of the sum.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, check_groups, on_cuda, rounded_product
from score_centering.precision.fp8 import E4M3, LARGEST

GROUP = 32
_BIAS = 127
_LARGEST_EXPONENT = 8  # of E4M3: 448 = 1.75 · 2**8
_ROUND_UP = 0x20  # added to a BF16 number's bits, it carries into the exponent from 1.75 on


def exponents(absmax: Tensor) -> Tensor:
    """The biased exponents, OCP's E8M0, of the powers of two that bring each absmax to at most 448.

    absmax (...) bfloat16 → (...) uint8.

    From 1.75 times a power of two on it is the next power. 0 has 0, a NaN or an infinity 247.
    """
    bits = absmax.view(torch.int16).to(torch.int32) + _ROUND_UP
    return ((bits >> 7) - _LARGEST_EXPONENT).clamp(0, 255).to(torch.uint8)


def powers(exponent: Tensor) -> Tensor:
    """The powers of two of biased exponents, exactly: exponent (...) uint8 → (...) bfloat16."""
    return torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent.int() - _BIAS).to(torch.bfloat16)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., I) bfloat16 → codes (..., I) float8_e4m3fn, exponents (..., I / 32) uint8.

    code = e4m3(clamp(bf16(x / 2^(exponent − 127)), −448, 448)), half to even.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    exponent = exponents(groups.abs().amax(dim=-1))
    scaled = groups / powers(exponent).unsqueeze(-1)
    return scaled.clamp_(-LARGEST, LARGEST).to(E4M3).flatten(-2), exponent


def decode(codes: Tensor, exponent: Tensor) -> Tensor:
    """codes (..., I), exponent (..., I / 32) uint8 → (..., I) bfloat16."""
    groups = codes.to(torch.bfloat16).unflatten(-1, (-1, GROUP))
    return (groups * powers(exponent).unsqueeze(-1)).flatten(-2)


_KIND = {
    "num_bits": 8, "type": "float", "strategy": "group", "symmetric": True, "group_size": GROUP,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
SCHEME = {"weights": _KIND | {"dynamic": False}, "input_activations": _KIND | {"dynamic": True}}


class MxFp8(Format):
    name, compressor, parts = "mxfp8", "mxfp8-quantized", ("weight", "weight_scale")
    scheme = SCHEME
    weight_error = (0.02, 0.035)
    group_size = GROUP

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        check_groups(self.name, GROUP, n_in)
        return {"weight": Kind((n_out, n_in), E4M3), "weight_scale": Kind((n_out, n_in // GROUP), torch.uint8)}

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        if not on_cuda(weights):
            return [quantise(weight) for weight in weights.values()]
        from score_centering.precision import weight_kernels

        return weight_kernels.power_of_two_groups(self, list(weights.values()), GROUP)

    def witness(self, stored: Stored) -> Tensor:
        """The exponent of a group with a NaN or infinite weight is above that of any finite one."""
        largest = stored["weight_scale"].amax()
        return torch.where(largest > 254 - _LARGEST_EXPONENT, torch.inf, largest.float())

    def hold(self, stored: Stored) -> tuple[Tensor, None]:
        return decode(stored["weight"], stored["weight_scale"]), None

    def dequantise(self, stored: Stored) -> Tensor:
        return decode(stored["weight"], stored["weight_scale"]).double()

    def quantise_input(self, x: Tensor) -> Tensor:
        return decode(*quantise(x)).double()

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        return rounded_product(decode(*quantise(x)), values)


FORMAT = MxFp8()
