"""BF16 linear layers: the format of what is not quantised."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from score_centering.precision.format import Format, Kind, Stored, rounded_product


class Bf16(Format):
    name, compressor, parts = "bf16", "dense", ("weight",)
    scheme: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({})
    weight_error = (0.0, 0.0)

    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        return {"weight": Kind((n_out, n_in), torch.bfloat16)}

    def _quantised(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor]]:
        return [(weight,) for weight in weights.values()]

    def witness(self, stored: Stored) -> Tensor:
        return stored["weight"]

    def hold(self, stored: Stored) -> tuple[Tensor, None]:
        return stored["weight"], None

    def dequantise(self, stored: Stored) -> Tensor:
        return stored["weight"].double()

    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        return rounded_product(x, values)


FORMAT = Bf16()
