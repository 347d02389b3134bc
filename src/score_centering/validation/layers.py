"""Error by layer: weights, activations and the KV cache, from runs of one model in BF16 and in low precision.

The low-precision run is an emulation that shares no code with the engines: hooks replace the output of each quantised
linear layer, and an attention function sends K and V through the cache's codes. It sees every intermediate tensor,
which an engine hides, and it is a second opinion on an engine's log-probs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from score_centering.precision import int4_kv
from score_centering.precision.format import Stored
from score_centering.precision.kv_caches import CacheFormat
from score_centering.precision.requantising import Listed

CACHED_ATTENTION = "score_centering_kv_cache"


@dataclass
class Error:
    """Running error of a tensor against its reference, in float64."""

    squared_error: float = 0.0
    squared_reference: float = 0.0
    max_error: float = 0.0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add tensors of equal shape; an empty one adds nothing."""
        difference = value.double() - reference.double()
        self.squared_error += difference.square().sum().item()
        self.squared_reference += reference.double().square().sum().item()
        self.max_error = max(self.max_error, difference.abs().amax().item() if difference.numel() else 0.0)

    @property
    def relative(self) -> float:
        """Norm of the error by the norm of the reference; 0 where both are 0."""
        if self.squared_error == 0.0:
            return 0.0
        return (self.squared_error / self.squared_reference) ** 0.5 if self.squared_reference else float("inf")

    def numbers(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}_relative": self.relative, f"{prefix}_max": self.max_error}


@dataclass
class LayerErrors:
    """Errors of one quantised linear layer in a low-precision run.

    `input`: quantising the activations that reach it. `local`: its output against the BF16 layer on the same input.
    `output`: its output against the whole BF16 model's, so with the error of every layer before it.
    """

    input: Error = field(default_factory=Error)
    local: Error = field(default_factory=Error)
    output: Error = field(default_factory=Error)


@dataclass
class KvErrors:
    """Errors of one attention layer's cached keys and values."""

    key: Error = field(default_factory=Error)
    value: Error = field(default_factory=Error)


def stored_parts(quantised: Mapping[str, Tensor], listed: Listed) -> dict[str, Stored]:
    """The stored tensors of each listed layer, out of a checkpoint."""
    return {layer: {part: quantised[f"{layer}.{part}"] for part in used.parts} for layer, used in listed.items()}


def weight_errors(
    base: Mapping[str, Tensor], quantised: Mapping[str, Tensor], listed: Listed
) -> dict[str, dict[str, float]]:
    """Per layer: relative and maximal error of the dequantised weight, and the largest relative error of a channel."""
    errors = {}
    for layer, stored in stored_parts(quantised, listed).items():
        weight = base[f"{layer}.weight"].double()
        dequantised = listed[layer].dequantise(stored)
        error = Error()
        error.add(dequantised, weight)
        norms = weight.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        channel = (dequantised - weight).norm(dim=1) / norms
        errors[layer] = {**error.numbers("weight"), "weight_channel_max": channel.max().item()}
    return errors


@contextmanager
def recorded_outputs(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Record the output of each named layer, one tensor a forward."""
    outputs: dict[str, list[Tensor]] = {layer: [] for layer in layers}

    def record(name: str, _module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        outputs[name].append(output.detach())

    with ExitStack() as stack:
        for name in layers:
            stack.enter_context(_hook(model, name, partial(record, name)))
        yield outputs


@contextmanager
def quantised_layers(
    model: nn.Module,
    layers: Mapping[str, Stored],
    listed: Listed,
    reference: Mapping[str, list[Tensor]] | None = None,
    mask: Tensor | None = None,
) -> Iterator[dict[str, LayerErrors]]:
    """Let the listed layers compute with the checkpoint's bytes; with `reference`, measure their errors.

    Args:
        layers: the stored tensors of each listed layer.
        reference: the recorded outputs of the BF16 run on the same batches.
        mask: (B, S) bool, the positions that count.
    """
    errors = {layer: LayerErrors() for layer in listed} if reference is not None else {}
    calls = dict.fromkeys(listed, 0)

    def compute(name: str, module: nn.Linear, inputs: tuple[Tensor], bf16: Tensor) -> Tensor:
        (x,) = inputs
        y = listed[name].linear(x, layers[name], module.bias)
        if reference is not None:
            errors[name].input.add(listed[name].quantise_input(x[mask]), x[mask])
            errors[name].local.add(y[mask], bf16[mask])
            errors[name].output.add(y[mask], reference[name][calls[name]][mask])
            calls[name] += 1
        return y

    with ExitStack() as stack:
        for name in listed:
            stack.enter_context(_hook(model, name, partial(compute, name)))
        yield errors


@contextmanager
def quantised_cache(model: nn.Module, cache: CacheFormat, mask: Tensor | None = None) -> Iterator[dict[str, KvErrors]]:
    """Let every softmax attention of `model` read K and V back from a cache; with `mask`, measure errors.

    Args:
        mask: (B, S) bool, the positions that count.
    """
    errors: dict[str, KvErrors] = {}
    previous = model.config._attn_implementation

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, scaling: float, **kwargs):
        entries = [cache.encode(x) for x in (key, value)]
        stored_key, stored_value = (cache.decode(entry) for entry in entries)
        if mask is not None:
            error = errors.setdefault(f"layer {module.layer_idx}", KvErrors())
            for record, entry, exact in zip((error.key, error.value), entries, (key, value), strict=True):
                record.add(cache.original(entry).transpose(1, 2)[mask], exact.transpose(1, 2)[mask])
        if not cache.rotated:
            narrowed = cache.narrow(query).float()
            output, weights = sdpa_attention_forward(
                module, narrowed, stored_key, stored_value, *args, scaling=scaling, **kwargs
            )
            return output.to(query.dtype), weights
        rotated = int4_kv.rotate(query).float()
        head_size = query.shape[-1]
        output, weights = sdpa_attention_forward(
            module, rotated, stored_key, stored_value, *args, scaling=scaling / head_size, **kwargs
        )
        return int4_kv.unrotate(output.to(query.dtype)), weights

    AttentionInterface.register(CACHED_ATTENTION, attend)
    AttentionMaskInterface.register(CACHED_ATTENTION, sdpa_mask)
    model.set_attn_implementation(CACHED_ATTENTION)
    try:
        yield errors
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def _hook(model: nn.Module, name: str, hook) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
