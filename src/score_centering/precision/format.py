"""What a number format of linear layers is: its stored tensors, how weights become them, and how it multiplies.

Axis letters: N rows (tokens), I input features, O output features, G groups of input features.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Stored = Mapping[str, Tensor]
"""The tensors that a checkpoint holds of one linear layer, by the part of their name after the layer's."""


@dataclass(frozen=True)
class Kind:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Format(ABC):
    """A number format of linear layers.

    An engine holds a layer as `values` (O, I) and, in some formats, a `scale` (O, 1): what `hold` makes of the stored
    tensors. Rows of both stand for output features, so layers that read the same input can be joined.

    name: in the configuration.
    parts: names of the stored tensors after the layer's.
    compressor: compressed-tensors' name of the way the tensors are stored.
    scheme: what compressed-tensors' configuration of the format says of `weights` and of `input_activations` (None
        where activations stay BF16).
    weight_error: the range in which the relative error of a layer's weights lies that are no special case.
    group_size: input features that share a scale and have to fill a layer's; None: all of an output channel.
    has_scale: whether `hold` gives a scale.
    whole_scale: whether a scale belongs to a whole layer; vLLM keeps one of the layers that it joins.
    linear_backend: vLLM 0.25.0's argument of this name, unless a user sets one.
    """

    name: str
    parts: tuple[str, ...]
    compressor: str
    scheme: Mapping[str, Mapping[str, Any] | None]
    weight_error: tuple[float, float]
    group_size: int | None = None
    has_scale: bool = False
    whole_scale: bool = False
    linear_backend: str = "auto"

    @abstractmethod
    def stored(self, n_out: int, n_in: int) -> dict[str, Kind]:
        """What a checkpoint holds of a layer with a weight (n_out, n_in).

        Raises:
            ValueError: the format can't hold this size.
        """

    def quantise(self, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Stored tensors of each layer, bit for bit as llm-compressor writes them on a CPU.

        Args:
            weights: layer → weight (O, I) bfloat16; all lie on one device.

        Raises:
            ValueError: naming a layer whose size the format can't hold.
        """
        check_matrices(weights)
        if self.group_size is not None:
            for layer, weight in weights.items():
                check_groups(f"{layer} in {self.name}", self.group_size, weight.shape[1])
        return name_parts(self, weights, self._quantised(weights))

    @abstractmethod
    def _quantised(self, weights: Mapping[str, Tensor]) -> Iterable[Sequence[Tensor]]:
        """Stored tensors of each of `quantise`'s layers, once they are checked, in the order of `parts`."""

    @abstractmethod
    def hold(self, stored: Stored) -> tuple[Tensor, Tensor | None]:
        """Values (O, I), int8 or bfloat16, and scale (O, 1) or None; in bfloat16 no value is rounded once more."""

    @abstractmethod
    def dequantise(self, stored: Stored) -> Tensor:
        """The weight (O, I) float64 that the stored tensors stand for."""

    def together(self, layer: str) -> tuple[str, ...]:
        """Layers that `quantise` has to see in one call, as far as all of them are quantised."""
        return (layer,)

    def witness(self, stored: Stored) -> Tensor:
        """A small stored tensor that is not finite where a weight was not."""
        return stored["weight_scale"]

    def quantise_input(self, x: Tensor) -> Tensor:
        """The activations that the product sees in place of x (..., I) bfloat16: (..., I) float64."""
        return x.double()

    def held_dtype(self, device: torch.device) -> torch.dtype:
        """Of the values in an engine; a CPU, which has no fast BF16 product, keeps them as FP32 copies."""
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    @abstractmethod
    def multiply(self, x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
        """The linear layer: x (..., I) bfloat16, values and scale as held (or as `hold` gives them) → (..., O)
        bfloat16."""

    def linear(self, x: Tensor, stored: Stored, bias: Tensor | None = None) -> Tensor:
        """x (..., I) bfloat16 through a layer as it is stored; the bias is added in bfloat16."""
        values, scale = self.hold(stored)
        out = self.multiply(x, values.to(self.held_dtype(x.device)), scale)
        return out if bias is None else out + bias

    def held_bytes(self, n_out: int, n_in: int, device: torch.device) -> int:
        """Bytes that an engine on `device` holds of a layer."""
        return n_out * n_in * self.held_dtype(device).itemsize + 4 * n_out * self.has_scale

    def quantization_config(self, targets: Sequence[str], ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint whose layers `targets` without `ignore` have this format."""
        group = {"targets": list(targets), "format": self.compressor, "output_activations": None, **self.scheme}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.compressor,
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }


def product(x: Tensor, values: Tensor) -> Tensor:
    """x (N, I) · values (O, I)ᵀ → (N, O) float32, summed in FP32; both bfloat16 on CUDA, and float32 that holds
    bfloat16 values on a CPU."""
    if x.is_cuda:
        return torch.mm(x, values.t(), out_dtype=torch.float32)
    return x @ values.t()


def rounded_product(x: Tensor, values: Tensor) -> Tensor:
    """The product of x (..., I) bfloat16 and values (O, I), summed in FP32 and rounded to bfloat16 once."""
    if x.is_cuda:
        return functional.linear(x, values)
    return (x.float() @ values.t()).to(torch.bfloat16)


def check_matrices(weights: Mapping[str, Tensor]) -> None:
    """Refuse what is no bfloat16 matrix."""
    for layer, weight in weights.items():
        if weight.dtype != torch.bfloat16 or weight.dim() != 2:
            raise ValueError(
                f"{layer}.weight is {weight.dtype} {tuple(weight.shape)}, must be a bfloat16 matrix (out, in)"
            )


def on_cuda(weights: Mapping[str, Tensor]) -> bool:
    """Whether the weights, which lie on one device, lie on a CUDA device."""
    return any(weight.is_cuda for weight in weights.values())


def name_parts(used: Format, layers: Iterable[str], made: Iterable[Sequence[Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The stored tensors of each layer under the names of `used.parts`."""
    return {layer: dict(zip(used.parts, parts, strict=True)) for layer, parts in zip(layers, made, strict=True)}


def check_groups(format_name: str, size: int, n_in: int) -> None:
    """Refuse input features that groups of `size` don't divide."""
    if n_in % size:
        raise ValueError(f"{format_name}: {n_in} input features, groups of {size} must divide them")
