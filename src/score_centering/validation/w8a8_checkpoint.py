"""Is a W8A8 checkpoint what its configuration says, and what its BF16 model gives? A wrong structure is refused."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from score_centering.settings import UserError

SCHEME = {
    "weights": {
        "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None
    },
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
}  # fmt: skip


def check_scheme(config: Mapping[str, Any], where: str) -> None:
    """Refuse a `quantization_config` that is not compressed-tensors' W8A8 (per channel, dynamic per token).

    Args:
        config: the checkpoint's `config.json`.
        where: the file's name, for the message.
    """
    scheme = config.get("quantization_config")
    if not scheme:
        raise UserError(f"{where}: no quantization_config: not a W8A8 checkpoint")
    _require(where, "quantization_config.quant_method", scheme.get("quant_method"), "compressed-tensors")
    _require(where, "quantization_config.format", scheme.get("format"), "int-quantized")
    _require(where, "quantization_config.kv_cache_scheme", scheme.get("kv_cache_scheme"), None)
    groups = scheme.get("config_groups") or {}
    if not groups:
        raise UserError(f"{where}: quantization_config.config_groups is empty: no layer would be quantised")
    for group, content in groups.items():
        for kind, expected in SCHEME.items():
            for key, value in expected.items():
                name = f"quantization_config.config_groups.{group}.{kind}.{key}"
                _require(where, name, (content.get(kind) or {}).get(key), value)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_tensors(base: Mapping[str, Tensor], w8a8: Mapping[str, Tensor], listed: Sequence[str], where: str) -> None:
    """Refuse a checkpoint whose listed layers are not INT8 codes with one BF16 scale an output channel."""
    for layer in listed:
        weight, scale = f"{layer}.weight", f"{layer}.weight_scale"
        for name in (weight, scale):
            if name not in w8a8:
                raise UserError(f"{where}: {name} is missing, but the configuration lists {layer} as quantised")
        shape = tuple(base[weight].shape)
        for name, dtype, expected in ((weight, torch.int8, shape), (scale, torch.bfloat16, (shape[0], 1))):
            tensor = w8a8[name]
            if tensor.dtype != dtype:
                raise UserError(f"{where}: {name} is {_dtype(tensor.dtype)}, must be {_dtype(dtype)}")
            if tuple(tensor.shape) != expected:
                raise UserError(f"{where}: {name} has shape {tuple(tensor.shape)}, must be {expected}")
    quantised = {f"{layer}.weight" for layer in listed}
    for name, tensor in w8a8.items():
        if tensor.dtype == torch.int8 and name not in quantised:
            raise UserError(f"{where}: {name} is int8, but the configuration does not list its layer as quantised")


def checkpoint_numbers(
    w8a8: Mapping[str, Tensor], fresh: Mapping[str, Tensor], listed: Sequence[str], linear_layers: Iterable[str]
) -> dict[str, float]:
    """How a checkpoint differs from a fresh requantisation of its BF16 model; 0 mismatches mean equal bit for bit.

    Args:
        w8a8: the checkpoint's tensors.
        fresh: the requantised BF16 tensors, same format.
        listed: the quantised layers.
        linear_layers: every linear layer of the model, whose weight elements are the divisor of the quantised share.
    """
    quantised = {f"{layer}.{kind}" for layer in listed for kind in ("weight", "weight_scale")}
    elements = {layer: fresh[f"{layer}.weight"].numel() for layer in linear_layers if f"{layer}.weight" in fresh}
    return {
        "checkpoint.mismatched_codes": _mismatches(w8a8, fresh, (f"{layer}.weight" for layer in listed)),
        "checkpoint.mismatched_scales": _mismatches(w8a8, fresh, (f"{layer}.weight_scale" for layer in listed)),
        "checkpoint.changed_unlisted_tensors": sum(
            name not in w8a8 or name not in fresh or not torch.equal(w8a8[name], fresh[name])
            for name in (w8a8.keys() | fresh.keys()) - quantised
        ),
        "checkpoint.quantised_layers": len(listed),
        "checkpoint.quantised_weight_share": sum(elements[layer] for layer in listed) / sum(elements.values()),
    }


def _mismatches(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(int((one[name] != other[name]).sum()) for name in names)


def _require(where: str, name: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise UserError(f"{where}: {name} = {value!r}, must be {expected!r}")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
