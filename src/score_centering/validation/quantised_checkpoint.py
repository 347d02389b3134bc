"""Is a quantised checkpoint what its configuration says, and what its BF16 model gives? Wrong structure is refused."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from score_centering.precision.requantising import Listed
from score_centering.settings import UserError


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def stored_names(listed: Listed) -> dict[str, str]:
    """Every tensor that the listed layers store, and its part of the layer: `<layer>.weight_scale` → weight_scale."""
    return {f"{layer}.{part}": part for layer, used in listed.items() for part in used.parts}


def check_tensors(base: Mapping[str, Tensor], quantised: Mapping[str, Tensor], listed: Listed, where: str) -> None:
    """Refuse a checkpoint whose listed layers are not stored as their format says, or that quantises others."""
    for layer, used in listed.items():
        missing = [f"{layer}.{part}" for part in used.parts if f"{layer}.{part}" not in quantised]
        if missing:
            raise UserError(f"{where}: {missing[0]} is missing, but the configuration lists {layer} as quantised")
        for part, kind in used.stored(*base[f"{layer}.weight"].shape).items():
            name = f"{layer}.{part}"
            tensor = quantised[name]
            if tensor.dtype != kind.dtype:
                raise UserError(f"{where}: {name} is {_dtype(tensor.dtype)}, must be {_dtype(kind.dtype)}")
            if tuple(tensor.shape) != kind.shape:
                raise UserError(f"{where}: {name} has shape {tuple(tensor.shape)}, must be {kind.shape}")
    known = stored_names(listed)
    for name, tensor in quantised.items():
        if name not in known and name in base and tensor.dtype != base[name].dtype:
            raise UserError(
                f"{where}: {name} is {_dtype(tensor.dtype)}, but the configuration does not list its layer as quantised"
            )


def checkpoint_numbers(
    base: Mapping[str, Tensor],
    quantised: Mapping[str, Tensor],
    fresh: Mapping[str, Tensor],
    listed: Listed,
    linear_layers: Iterable[str],
) -> dict[str, float]:
    """How a checkpoint differs from a fresh requantisation of its BF16 model; 0 mismatches mean equal bit for bit.

    Args:
        base: the BF16 tensors.
        quantised: the checkpoint's tensors.
        fresh: the requantised BF16 tensors, same format.
        listed: the quantised layers.
        linear_layers: every linear layer of the model, whose weight elements are the divisor of the quantised share.
    """
    stored = stored_names(listed)
    scales = [name for name, part in stored.items() if "scale" in part]
    codes = [name for name in stored if name not in set(scales)]
    elements = {layer: base[f"{layer}.weight"].numel() for layer in linear_layers if f"{layer}.weight" in base}
    return {
        "checkpoint.mismatched_codes": _mismatches(quantised, fresh, codes),
        "checkpoint.mismatched_scales": _mismatches(quantised, fresh, scales),
        "checkpoint.changed_unlisted_tensors": sum(
            name not in quantised or name not in fresh or not torch.equal(quantised[name], fresh[name])
            for name in (quantised.keys() | fresh.keys()) - stored.keys()
        ),
        "checkpoint.quantised_layers": len(listed),
        "checkpoint.quantised_weight_share": sum(elements[layer] for layer in listed) / sum(elements.values()),
    }


def _mismatches(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """Stored numbers that differ, bit by bit where a float8 has no comparison."""
    return sum(int((_bits(one[name]) != _bits(other[name])).sum()) for name in names)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
