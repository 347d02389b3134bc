"""What the engine remembers of each row: KV cache, convolution inputs and recurrent state, all of fixed size.

Row r of every tensor belongs to slot r, so rows never mix, and a slot is handed on by copying one row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from score_centering.precision.registry import cache_format_of
from score_centering.rollout.local.architecture import Architecture


@dataclass(frozen=True)
class AttentionState:
    """`kv` (B, 2·Hkv, S, ·): keys of all KV heads, then values, as entries of a `CacheFormat`."""

    kv: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.kv


@dataclass(frozen=True)
class LinearAttentionState:
    """`conv` (B, W − 1, C) bfloat16: the last inputs of the convolution. `recurrent` (B, Hv, Dk, Dv)."""

    conv: Tensor
    recurrent: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.conv
        yield self.recurrent


class State:
    """The memory of `rows` sequences of up to `positions` tokens. Every new row starts from zeros."""

    def __init__(self, layers: list[AttentionState | LinearAttentionState]):
        self.layers = layers

    @classmethod
    def zeros(
        cls,
        architecture: Architecture,
        rows: int,
        positions: int,
        kv_format: str,
        recurrent_dtype: torch.dtype,
        device: torch.device,
    ) -> "State":
        def layer(kind: str) -> AttentionState | LinearAttentionState:
            if kind == "full_attention":
                cache = cache_format_of(kv_format)
                shape = (rows, 2 * architecture.kv_heads, positions, cache.entry_size(architecture.head_size))
                return AttentionState(torch.zeros(shape, dtype=cache.dtype, device=device))
            linear = architecture.linear
            conv_shape = (rows, linear.conv_width - 1, linear.conv_features)
            recurrent_shape = (rows, linear.value_heads, linear.key_size, linear.value_size)
            return LinearAttentionState(
                conv=torch.zeros(conv_shape, dtype=torch.bfloat16, device=device),
                recurrent=torch.zeros(recurrent_shape, dtype=recurrent_dtype, device=device),
            )

        return cls([layer(kind) for kind in architecture.layer_kinds])

    def first_rows(self, rows: int) -> "State":
        """A view of the first rows."""
        return State([type(layer)(*(tensor[:rows] for tensor in layer.tensors())) for layer in self.layers])

    @property
    def rows(self) -> int:
        return next(self.layers[0].tensors()).shape[0]

    def up_to(self, positions: int) -> "State":
        """A view whose KV caches end after `positions`."""
        return State(
            [
                AttentionState(layer.kv[:, :, :positions]) if isinstance(layer, AttentionState) else layer
                for layer in self.layers
            ]
        )

    def copy_rows(self, rows: Tensor, source: "State", source_rows: Tensor) -> None:
        """self[rows] = source[source_rows]; the sequences of `source` may be shorter."""
        for target_layer, source_layer in zip(self.layers, source.layers, strict=True):
            for target, origin in zip(target_layer.tensors(), source_layer.tensors(), strict=True):
                if isinstance(target_layer, AttentionState):
                    target = target[:, :, : origin.shape[2]]
                target[rows] = origin[source_rows].to(target.dtype)

    def clear(self) -> None:
        """Back to zeros, so that nothing (not even a NaN) of earlier rows is left."""
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor.zero_()

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by what holds them."""
        total = {"kv_cache": 0, "linear_attention": 0}
        for layer in self.layers:
            kind = "kv_cache" if isinstance(layer, AttentionState) else "linear_attention"
            total[kind] += sum(tensor.nbytes for tensor in layer.tensors())
        return total
