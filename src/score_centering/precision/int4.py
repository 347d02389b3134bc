"""INT4 weights, BF16 activations (W4A16): symmetric codes with a BF16 scale an output channel, or a group of 128.

Codes and scales are compressed-tensors'. The product sees the BF16 weight bf16(code · scale), as compressed-tensors
decompresses it; vLLM's Marlin kernel multiplies by the scale in the same place where it is one of a group.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, check_groups, on_cuda, rounded_product

CODES_A_WORD = 8
_OFFSET = 8  # codes are stored as code + 8


def quantise_weight(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight (O, I) bfloat16 → codes (O, I) int8 from −8 to 7, scale (O, I / group_size) bfloat16, each step in BF16.

    scale = absmax / 7.5 (2**-7 where that is 0), code = rint(clamp(bf16(w / scale), −8, 7)).
    """
    groups = weight.unflatten(1, (-1, group_size))
    absmax = groups.abs().amax(dim=2, keepdim=True)
    scale = torch.div(absmax, torch.full_like(absmax, 7.5))
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    return (groups / scale).clamp_(-8, 7).round_().to(torch.int8).flatten(1), scale.squeeze(2)


def pack(codes: Tensor) -> Tensor:
    """codes (O, I) int8 → (O, ⌈I / 8⌉) int32: code + 8 in 4 bits each, the first in the lowest; the rest is 0."""
    nibbles = (codes + _OFFSET).to(torch.int32)
    nibbles = torch.nn.functional.pad(nibbles, (0, -codes.shape[1] % CODES_A_WORD)).unflatten(1, (-1, CODES_A_WORD))
    shifts = torch.arange(0, 4 * CODES_A_WORD, 4, device=codes.device, dtype=torch.int32)
    return (nibbles << shifts).sum(dim=2, dtype=torch.int32)


def unpack(packed: Tensor, n_in: int) -> Tensor:
    """The inverse of `pack`: packed (O, ⌈I / 8⌉) int32 → codes (O, I) int8."""
    shifts = torch.arange(0, 4 * CODES_A_WORD, 4, device=packed.device, dtype=torch.int32)
    nibbles = (packed.unsqueeze(2) >> shifts) & 0xF
    return (nibbles - _OFFSET).to(torch.int8).flatten(1)[:, :n_in]


class Int4(Format):
    compressor, parts = "pack-quantized", ("weight_packed", "weight_scale", "weight_shape")

    def __init__(self, name: str, group_size: int | None, weight_error: tuple[float, float]) -> None:
        self.name, self.group_size, self.weight_error = name, group_size, weight_error
        weights = {
            "num_bits": 4, "type": "int", "strategy": "channel" if group_size is None else "group", "symmetric": True,
            "dynamic": False, "group_size": group_size,
        }  # fmt: skip
        self.scheme = {"weights": weights, "input_activations": None}

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        check_groups(self.name, self.group_size or n_in, n_in)
        return {
            "weight_packed": Kind((n_out, -(-n_in // CODES_A_WORD)), torch.int32),
            "weight_scale": Kind((n_out, n_in // (self.group_size or n_in)), torch.bfloat16),
            "weight_shape": Kind((2,), torch.int64),
        }

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
        if on_cuda(weights):
            made = self._quantise_on_cuda(list(weights.values()))
        else:
            pairs = [quantise_weight(weight, self.group_size or weight.shape[1]) for weight in weights.values()]
            made = [(pack(codes), scale) for codes, scale in pairs]
        shapes = torch.tensor([weight.shape for weight in weights.values()])
        shapes = shapes.to(next(iter(weights.values())).device)
        return [(*pair, shape) for pair, shape in zip(made, shapes.unbind(), strict=True)]

    def _quantise_on_cuda(self, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        from score_centering.precision import weight_kernels

        if self.group_size is None:
            return weight_kernels.by_channel(self, weights, "int4", 7.5)
        return weight_kernels.integer_groups(self, weights, self.group_size)

    def hold(self, stored: Stored) -> tuple[Tensor, None]:
        codes, scale = self._codes(stored)
        return (codes.to(torch.bfloat16) * scale).flatten(1), None

    def dequantise(self, stored: Stored) -> Tensor:
        codes, scale = self._codes(stored)
        return (codes.double() * scale.double()).flatten(1)

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        return rounded_product(x, values)

    def _codes(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """Codes (O, G, I / G) and scale (O, G, 1)."""
        scale = stored["weight_scale"]
        n_in = self.group_size * scale.shape[1] if self.group_size else int(stored["weight_shape"][1])
        return unpack(stored["weight_packed"], n_in).unflatten(1, (scale.shape[1], -1)), scale.unsqueeze(2)


GROUPS = Int4("int4", 128, (0.1, 0.15))
CHANNELS = Int4("int4_channel", None, (0.1, 0.3))
