"""The adapter between trainer and rollout engine: the trainer's BF16 weights in the bytes of a quantised checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from score_centering.precision.format import Format
from score_centering.precision.names import text_name
from score_centering.precision.registry import FORMATS, format_of
from score_centering.user_error import UserError

Listed = Mapping[str, Format]
"""Layers that are quantised, in module order, and the format of each."""


def identify(config: Mapping[str, Any], where: str = "config.json") -> Format:
    """The number format of a checkpoint, by the `quantization_config` of its config.json.

    Args:
        where: the file's name, for the message.

    Raises:
        UserError: there is none, or it is none of `registry.FORMATS`; names the first entry that differs from the
            nearest of them.
    """
    scheme = config.get("quantization_config")
    if not scheme:
        raise UserError(f"{where}: no quantization_config: not a quantised checkpoint")
    _require(where, "quantization_config.quant_method", scheme.get("quant_method"), "compressed-tensors")
    _require(where, "quantization_config.kv_cache_scheme", scheme.get("kv_cache_scheme"), None)
    formats = [format_of(name) for name in FORMATS]
    allowed = sorted({known.compressor for known in formats})
    if scheme.get("format") not in allowed:
        given = scheme.get("format")
        raise UserError(f"{where}: quantization_config.format = {given!r}, allowed are {', '.join(allowed)}")
    groups = scheme.get("config_groups") or {}
    if len(groups) != 1:
        raise UserError(f"{where}: quantization_config.config_groups has {len(groups)} groups, must be one")
    ((group, content),) = groups.items()
    wrong: dict[str, list[tuple[str, Any, Any]]] = {}
    for known in formats:
        if known.compressor == scheme["format"]:
            wrong[known.name] = _differences(known, content)
    nearest = min(wrong, key=lambda name: len(wrong[name]))
    for name, value, expected in wrong[nearest]:
        _require(where, f"quantization_config.config_groups.{group}.{name}", value, expected)
    return format_of(nearest)


def _differences(known: Format, group: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Entries of a config group that are not the format's: (name, value, the format's)."""
    found = []
    for kind, expected in known.scheme.items():
        given = group.get(kind)
        if expected is None:
            found += [] if given is None else [(kind, given, None)]
            continue
        values = {key: (given or {}).get(key) for key in expected}
        found += [(f"{kind}.{key}", values[key], value) for key, value in expected.items() if values[key] != value]
    return found


def _require(where: str, name: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise UserError(f"{where}: {name} = {value!r}, must be {expected!r}")


def listed_linears(config: Mapping[str, Any], model: nn.Module, where: str = "config.json") -> dict[str, Format]:
    """`model`'s linear layers that a quantised checkpoint's config.json lists, in module order, with their format.

    The rule is compressed-tensors': a layer is listed if a target names it or one of its classes and no ignore entry
    does; entries that start with `re:` are patterns matched from the name's start. A config.json of the multimodal
    class lists the layers of its text model too.

    Raises:
        UserError: see `identify`; or a layer whose size the format can't hold.
    """
    found = identify(config, where)
    quantization = config["quantization_config"]
    (group,) = quantization["config_groups"].values()
    listed = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and any(_names(entry, name, module) for entry in group["targets"])
            and not any(_names(entry, name, module) for entry in quantization["ignore"])
        ):
            try:
                found.stored(module.out_features, module.in_features)
            except ValueError as error:
                raise UserError(f"{where}: {name} can't be quantised: {error}") from None
            listed[name] = found
    return listed


def _names(entry: str, name: str, module: nn.Module) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return text_name(entry) == text_name(name) or any(entry == parent.__name__ for parent in type(module).__mro__)


def requantise(weights: Mapping[str, Tensor], listed: Listed) -> dict[str, Tensor]:
    """Quantise the listed linear layers once; everything else passes through as the same tensor.

    weights: parameter name → tensor, `<layer>.weight` (out, in) bfloat16 for every listed layer.
    Returns checkpoint format in the same order, each listed `<layer>.weight` as the tensors that its format stores: bit
    for bit what llm-compressor writes for these weights.
    """
    missing = sorted({f"{layer}.weight" for layer in listed} - weights.keys())
    if missing:
        raise ValueError(f"requantise: no weight {missing[0]!r}, but the quantised model's config lists its layer")
    stored: dict[str, dict[str, Tensor]] = {}
    for known in dict.fromkeys(listed.values()):
        layers = {layer: weights[f"{layer}.weight"] for layer in listed if listed[layer] is known}
        try:
            stored |= known.quantise(layers)
        except ValueError as error:
            raise ValueError(f"requantise: {error}") from None
    _refuse_non_finite(stored, listed)
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in stored:
            result |= {f"{layer}.{part}": value for part, value in stored[layer].items()}
        else:
            result[name] = tensor
    return result


def _refuse_non_finite(stored: Mapping[str, Mapping[str, Tensor]], listed: Listed) -> None:
    """One device round trip for all layers."""
    if not stored:
        return
    witnesses = {layer: listed[layer].witness(parts).flatten().float() for layer, parts in stored.items()}
    if torch.isfinite(torch.cat(list(witnesses.values()))).all():
        return
    layer = next(layer for layer, witness in witnesses.items() if not torch.isfinite(witness).all())
    raise ValueError(
        f"requantise: {layer}.weight holds a NaN or an infinite value, only finite weights can be quantised"
    )
