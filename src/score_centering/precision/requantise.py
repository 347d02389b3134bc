"""The adapter between trainer and rollout engine: the trainer's BF16 weights in the bytes of a W8A8 checkpoint."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from score_centering.precision.int8 import quantise_weights
from score_centering.precision.names import text_name


def listed_linears(w8a8_config: dict, model: nn.Module) -> list[str]:
    """Names of `model`'s linear layers that a W8A8 config.json quantises, in module order.

    The rule is compressed-tensors': a layer is listed if a target names it or one of its classes and no ignore entry
    does; entries that start with `re:` are patterns matched from the name's start. A config.json of the multimodal
    class lists the layers of its text model too.
    """
    quantization = w8a8_config["quantization_config"]
    (group,) = quantization["config_groups"].values()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and any(_names(entry, name, module) for entry in group["targets"])
        and not any(_names(entry, name, module) for entry in quantization["ignore"])
    ]


def _names(entry: str, name: str, module: nn.Module) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return text_name(entry) == text_name(name) or any(entry == parent.__name__ for parent in type(module).__mro__)


def requantise(weights: Mapping[str, Tensor], listed: Sequence[str]) -> dict[str, Tensor]:
    """Quantise the listed linear layers once; everything else passes through as the same tensor.

    weights: parameter name → tensor, `<layer>.weight` (out, in) bfloat16 for every listed layer.
    Returns checkpoint format in the same order, each listed `<layer>.weight` as int8 followed by
    `<layer>.weight_scale` (out, 1) bfloat16: bit for bit what llm-compressor writes for these weights.
    """
    pending = {f"{layer}.weight" for layer in listed}
    missing = sorted(pending - weights.keys())
    if missing:
        raise ValueError(f"requantise: no weight {missing[0]!r}, but the W8A8 config lists its layer")
    names = [name for name in weights if name in pending]
    for name in names:
        if weights[name].dtype != torch.bfloat16 or weights[name].dim() != 2:
            raise ValueError(
                f"requantise: {name} is {weights[name].dtype} {tuple(weights[name].shape)}, "
                "must be a bfloat16 matrix (out, in)"
            )
    quantised = dict(zip(names, quantise_weights([weights[name] for name in names]), strict=True))
    _refuse_non_finite(quantised)
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in quantised:
            result[name], result[f"{name}_scale"] = quantised[name]
        else:
            result[name] = tensor
    return result


def _refuse_non_finite(quantised: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """One device round trip for all layers: a NaN or infinite weight shows in its channel's scale."""
    if not quantised or torch.isfinite(torch.cat([scale for _, scale in quantised.values()])).all():
        return
    name = next(name for name, (_, scale) in quantised.items() if not torch.isfinite(scale).all())
    raise ValueError(f"requantise: {name} holds a NaN or an infinite value, only finite weights can be quantised")
