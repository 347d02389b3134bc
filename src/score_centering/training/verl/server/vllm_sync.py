"""From the trainer's parameters to vLLM's: names, requantising, and that each is written exactly once a sync.

vLLM joins layers that read the same input into one parameter and takes their parts as shards. It asks nobody whether a
part came at all, or twice, so `Sync` counts them.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from score_centering.precision import listed_linears, requantise
from score_centering.precision.names import (
    MULTIMODAL_ARCHITECTURES,
    multimodal_name,
    text_part,
)
from score_centering.rollout.local.architecture import parameter_model

# Of vLLM 0.25.0's Qwen3_5Model and LlamaModel: trainer's layer → joined layer, and the part's number in it.
JOINED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", "q"),
    "self_attn.k_proj": ("self_attn.qkv_proj", "k"),
    "self_attn.v_proj": ("self_attn.qkv_proj", "v"),
    "mlp.gate_proj": ("mlp.gate_up_proj", "0"),
    "mlp.up_proj": ("mlp.gate_up_proj", "1"),
    "linear_attn.in_proj_qkv": ("linear_attn.in_proj_qkvz", "0, 1, 2"),
    "linear_attn.in_proj_z": ("linear_attn.in_proj_qkvz", "3"),
    "linear_attn.in_proj_b": ("linear_attn.in_proj_ba", "0"),
    "linear_attn.in_proj_a": ("linear_attn.in_proj_ba", "1"),
}
SWITCHES = ("enable_chunked_prefill", "enable_prefix_caching")


def engine_parameter(name: str) -> tuple[str, str]:
    """The parameter of vLLM's text model, and the part of it, that a checkpoint tensor is written to."""
    layer, _, kind = name.rpartition(".")
    for part, (joined, shard) in JOINED.items():
        if layer.endswith(part):
            return f"{layer.removesuffix(part)}{joined}.{kind}", shard
    return name, ""


class Sync:
    """One hand-over of all weights, bucket by bucket.

    Args:
        hf_config: transformers' configuration of the trained model (a text model, or the multimodal one around it).
        engine_config: content of the config.json that vLLM was started with, quantised by its `quantization_config`.
    """

    def __init__(self, hf_config: Any, engine_config: Mapping[str, Any]) -> None:
        model = parameter_model(hf_config.get_text_config())
        self._multimodal = engine_config["architectures"][0] in MULTIMODAL_ARCHITECTURES
        self._listed = listed_linears(engine_config, model) if "quantization_config" in engine_config else {}
        # named_parameters has a tied tensor once, under the embedding's name
        self._pending = {name for name, _ in model.named_parameters()}
        self._tied = {"lm_head.weight"} - self._pending
        self._known = frozenset(self._pending)
        self._written: set[tuple[str, str]] = set()
        self._waiting: dict[str, Tensor] = {}

    def bucket(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one bucket as vLLM loads them: its names, stored tensors of the listed layers, BF16 else.

        Each is a tensor of its own: the bucket's memory is overwritten by the next one while vLLM still collects.

        Raises:
            ValueError: a parameter that the model does not have, or that came before.
        """
        text = text_part(dict(weights))
        for name, value in text.items():
            if name in self._tied:
                continue
            if name not in self._known:
                raise ValueError(f"weight sync: {name} is no parameter of this model")
            if name not in self._pending:
                raise ValueError(f"weight sync: {name} came twice")
            self._pending.discard(name)
            for stored, tensor in self._made(name, value.to(torch.bfloat16)).items():
                self._count(stored)
                engine_name = multimodal_name(stored) if self._multimodal else stored
                yield engine_name, tensor.clone() if tensor.data_ptr() == value.data_ptr() else tensor

    def _made(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """What becomes of a parameter; a layer waits for those that its format quantises with it."""
        layer = name.removesuffix(".weight")
        if layer not in self._listed:
            return {name: value}
        used = self._listed[layer]
        group = used.together(layer)
        if len(group) == 1 or not all(each in self._listed for each in group):
            return requantise({name: value}, {layer: used})
        self._waiting[layer] = value.clone()
        if not all(each in self._waiting for each in group):
            return {}
        ready = {f"{each}.weight": self._waiting.pop(each) for each in group}
        return requantise(ready, dict.fromkeys(group, used))

    def finish(self) -> None:
        """All weights have come.

        Raises:
            ValueError: one has not.
        """
        if self._pending:
            missing = f"{len(self._pending)} of {len(self._known)} are missing"
            raise ValueError(f"weight sync: {min(self._pending)} did not come ({missing})")

    def _count(self, stored: str) -> None:
        target = engine_parameter(stored)
        if target in self._written:
            raise ValueError(f"weight sync: {target[0]} part {target[1]!r} is written twice, at last by {stored}")
        self._written.add(target)


def engine_overrides(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """vLLM's `quantization` and `hf_overrides` for a quantised model's config.json."""
    return "compressed-tensors", {"quantization_config": dict(config["quantization_config"])}


def flat_caches(caches: Iterable[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """The layers' caches of vLLM's model runner, one by one: full attention has one, gated linear attention a list of
    two (convolution and recurrent state)."""
    return [tensor for cache in caches for tensor in ([cache] if isinstance(cache, Tensor) else cache)]


def set_switches(args: Namespace, config: Any) -> None:
    """Sets vLLM's arguments to what verl's rollout configuration says of them; verl's command line for vLLM leaves a
    False out, and vLLM's own default for chunked prefill is True."""
    for name in SWITCHES:
        setattr(args, name, getattr(config, name))


def engine_arguments(architecture: str) -> dict[str, Any]:
    """vLLM arguments of an engine from token ids to token ids, CUDA graphs without the compiler."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    if architecture in MULTIMODAL_ARCHITECTURES:
        arguments |= {"language_model_only": True, "gdn_prefill_backend": "triton"}
    return arguments
