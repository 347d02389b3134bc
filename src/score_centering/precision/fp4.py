"""NVFP4 weights: E2M1 codes, an E4M3 scale for each 16 input features, one FP32 scale a matrix; activations in BF16.

Codes and scales are compressed-tensors' (llm-compressor's NVFP4A16). The product of an E2M1 and an E4M3 number has 6
significant bits, so BF16 holds it exactly; the matrix's scale multiplies the FP32 sum.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, check_groups, on_cuda, product
from score_centering.precision.fp8 import E4M3, LARGEST

GROUP = 16
LARGEST_CODE = 6.0
SMALLEST_SCALE = 0.125  # a group of zeros has this one
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 by the three low bits of their code; the fourth is the sign."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM joins share one matrix scale."""


def joined(layer: str) -> tuple[str, ...]:
    """The layers that vLLM joins with this one, itself among them."""
    parent, _, name = layer.rpartition(".")
    return tuple(f"{parent}.{each}" for each in next((names for names in TOGETHER if name in names), (name,)))


def groups_of(layers: Iterable[str]) -> list[list[str]]:
    """`layers` by the matrix scale that they share, in their order; a group that is not complete shares none."""
    present = dict.fromkeys(layers)
    groups: dict[str, list[str]] = {}
    for layer in present:
        complete = all(each in present for each in joined(layer))
        groups.setdefault(joined(layer)[0] if complete else layer, []).append(layer)
    return list(groups.values())


def matrix_scale(absmax: Tensor) -> Tensor:
    """The scale of matrices by the largest magnitude in each, absmax (L,) bfloat16: (L,) float32.

    448 · 6 / absmax as compressed-tensors rounds it in BF16; 1 where that is no finite number.
    """
    absmax = absmax.clamp(min=torch.finfo(absmax.dtype).tiny)
    return (LARGEST * LARGEST_CODE / absmax).nan_to_num(1.0, 1.0, 1.0).float()


def shared_absmax(layers: Iterable[str], absmax: Tensor) -> Tensor:
    """absmax (L,) of `layers`, each entry the largest of the layers that share a scale; a NaN is the largest."""
    place = {layer: group for group, names in enumerate(groups_of(layers)) for layer in names}
    groups = torch.tensor([place[layer] for layer in layers]).to(absmax.device)
    bits = absmax.view(torch.int16).int()
    largest = torch.zeros_like(bits).scatter_reduce_(0, groups, bits, "amax")
    return largest[groups].to(torch.int16).view(torch.bfloat16)


def round_to_e2m1(x: Tensor) -> Tensor:
    """x (...) within ±6, rounded to the nearest E2M1 number, ties to the even code; −0 stays where x rounds to it."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round() * step * torch.sign(x)


def quantise_weight(weight: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """weight (O, I) bfloat16, whole (1,) float32, the matrix's → E2M1 numbers (O, I) float32, scale (O, I / 16)
    float8_e4m3fn.

    scale = e4m3(whole · bf16(absmax / 6)) (2**-3 where that is 0), number = e2m1(clamp(w / (scale / whole), −6, 6)).
    """
    groups = weight.unflatten(1, (-1, GROUP))
    absmax = groups.abs().amax(dim=2)
    scale = whole * torch.div(absmax, torch.full_like(absmax, LARGEST_CODE))
    scale = scale.clamp(-LARGEST, LARGEST).to(E4M3)
    used = scale.float()
    used = torch.where(used == 0, SMALLEST_SCALE, used)
    scaled = groups / (used / whole).unsqueeze(2)
    return round_to_e2m1(scaled.clamp(-LARGEST_CODE, LARGEST_CODE)).flatten(1), used.to(E4M3)


def pack(numbers: Tensor) -> Tensor:
    """E2M1 numbers (O, I) → codes (O, I / 2) uint8, the first of a pair in the low nibble."""
    magnitudes = torch.tensor(MAGNITUDES, device=numbers.device)
    codes = torch.bucketize(numbers.abs(), magnitudes).to(torch.uint8)
    codes |= torch.signbit(numbers).to(torch.uint8) << 3
    even, odd = codes.unflatten(1, (-1, 2)).unbind(2)
    return even | (odd << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: packed (O, I / 2) uint8 → (O, I) bfloat16."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=2).flatten(1)
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.bfloat16, device=packed.device)
    numbers = magnitudes[(codes & 0x7).int()]
    return torch.where(codes > 7, -numbers, numbers)


SCHEME = {
    "weights": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "dynamic": False,
        "group_size": GROUP, "scale_dtype": "torch.float8_e4m3fn",
    },
    "input_activations": None,
}  # fmt: skip


class NvFp4(Format):
    name, compressor = "nvfp4", "nvfp4-pack-quantized"
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    scheme = SCHEME
    weight_error = (0.07, 0.12)
    group_size = GROUP
    has_scale = True
    whole_scale = True

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        check_groups(self.name, GROUP, n_in)
        return {
            "weight_packed": Kind((n_out, n_in // 2), torch.uint8),
            "weight_scale": Kind((n_out, n_in // GROUP), E4M3),
            "weight_global_scale": Kind((1,), torch.float32),
        }

    def together(self, layer: str) -> tuple[str, ...]:
        return joined(layer)

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
        matrices = list(weights.values())
        if on_cuda(weights):
            from score_centering.precision import weight_kernels

            whole = matrix_scale(shared_absmax(weights, weight_kernels.absmax(matrices)))
            made = weight_kernels.float_groups(self, matrices, whole, GROUP)
        else:
            largest = torch.stack([weight.abs().amax() for weight in matrices])
            whole = matrix_scale(shared_absmax(weights, largest))
            pairs = [quantise_weight(weight, each) for weight, each in zip(matrices, whole.split(1), strict=True)]
            made = [(pack(numbers), scale) for numbers, scale in pairs]
        return [(*pair, each) for pair, each in zip(made, whole.split(1), strict=True)]

    def witness(self, stored: Stored) -> Tensor:
        """A NaN weight makes its group's scale NaN, an infinite one the matrix scale 0."""
        largest = stored["weight_scale"].view(torch.uint8).amax().reshape(1)  # scales are positive, NaN is 0x7F or 0xFF
        return torch.where(largest >= 0x7F, torch.inf, 1 / stored["weight_global_scale"])

    def hold(self, stored: Stored) -> tuple[Tensor, Tensor]:
        packed, scale = stored["weight_packed"], stored["weight_scale"].to(torch.bfloat16)
        values = unpack(packed).unflatten(1, (-1, GROUP)) * scale.unsqueeze(2)
        return values.flatten(1), (1.0 / stored["weight_global_scale"]).expand(packed.shape[0], 1)

    def dequantise(self, stored: Stored) -> Tensor:
        numbers = unpack(stored["weight_packed"]).double().unflatten(1, (-1, GROUP))
        return (numbers * stored["weight_scale"].double().unsqueeze(2)).flatten(1) / stored[
            "weight_global_scale"
        ].double()

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        total = product(rows.to(values.dtype), values)
        return total.mul_(scale.t()).to(torch.bfloat16).reshape(*x.shape[:-1], -1)


WEIGHTS = NvFp4()
