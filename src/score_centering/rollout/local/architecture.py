"""What the local engine needs to know of a model: sizes, layer kinds, rotary tables, parameter names and shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from score_centering.settings import UserError


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of a gated linear attention layer (Gated Delta Networks, arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    @property
    def key_features(self) -> int:
        return self.key_heads * self.key_size

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_size

    @property
    def conv_features(self) -> int:
        return 2 * self.key_features + self.value_features


@dataclass(frozen=True)
class Experts:
    """Sizes of the mixture of experts in every layer: each token takes `top_k` of `count`, and the shared one."""

    count: int
    top_k: int


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` compute beyond Llama's.

    rotary: transformers' own class.  position_axes: rows of positions it takes; 3 are time, height and width, which are
    one for text.  qkv_bias: q, k and v have biases.  qk_norm: q and k are normalised head by head.  output_gate: q_proj
    also makes a gate of the attention's output.  norm_offset: norm weights are stored as w − norm_offset.  required:
    further keys of the config and the one value that is computed.  linear, experts: sizes of what only some families
    have.
    """

    rotary: type[torch.nn.Module]
    position_axes: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    norm_offset: int = 0
    required: Mapping[str, Any] = field(default_factory=dict)
    linear: Callable[[PreTrainedConfig], LinearAttention] | None = None
    experts: Callable[[PreTrainedConfig], Experts] | None = None


def _linear_attention(config: PreTrainedConfig) -> LinearAttention:
    return LinearAttention(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )


def _experts(config: PreTrainedConfig) -> Experts:
    return Experts(count=config.num_experts, top_k=config.num_experts_per_tok)


NO_BIAS = {"attention_bias": False}
QWEN3_5 = Family(
    Qwen3_5TextRotaryEmbedding,
    position_axes=3,
    qk_norm=True,
    output_gate=True,
    norm_offset=1,
    required=NO_BIAS,
    linear=_linear_attention,
)
FAMILIES = {
    "llama": Family(LlamaRotaryEmbedding, required=NO_BIAS | {"mlp_bias": False}),
    "qwen2": Family(Qwen2RotaryEmbedding, qkv_bias=True),
    "qwen3": Family(Qwen3RotaryEmbedding, qk_norm=True, required=NO_BIAS),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, experts=_experts),
}
LAYER_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class Architecture:
    """A decoder-only model of one of `FAMILIES`."""

    family: Family
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[Literal["full_attention", "linear_attention"], ...]
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    linear: LinearAttention | None
    experts: Experts | None


def read_architecture(config: PreTrainedConfig) -> Architecture:
    """The parts of a transformers config that the engine computes with; refuses what it would compute wrongly."""
    if config.model_type not in FAMILIES:
        raise UserError(f"local engine: model_type {config.model_type!r}, allowed are {sorted(FAMILIES)}")
    family = FAMILIES[config.model_type]
    for name, allowed in {"hidden_act": "silu", **family.required}.items():
        if getattr(config, name) != allowed:
            raise UserError(f"local engine: {name} is {getattr(config, name)!r}, allowed is {allowed!r}")
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        raise UserError(f"local engine: rope_type {config.rope_parameters['rope_type']!r} changes with the length")
    kinds = tuple(config.to_dict().get("layer_types") or ("full_attention",) * config.num_hidden_layers)
    known = LAYER_KINDS if family.linear else LAYER_KINDS[:1]
    if unknown := set(kinds) - set(known):
        raise UserError(f"local engine: layer type {min(unknown)!r}, allowed are {', '.join(known)}")
    return Architecture(
        family=family,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_kinds=kinds,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        linear=family.linear and family.linear(config),
        experts=family.experts and family.experts(config),
    )


def rotary_table(config: PreTrainedConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, rotary dims) in BF16, as transformers' own module computes them."""
    family = FAMILIES[config.model_type]
    index = torch.arange(positions)[None]
    if family.position_axes > 1:
        index = index.expand(family.position_axes, 1, -1)
    cos, sin = family.rotary(config)(torch.empty(0, dtype=torch.bfloat16), index)
    return cos[0].to(device), sin[0].to(device)


def parameter_model(config: PreTrainedConfig) -> torch.nn.Module:
    """transformers' model without storage: its parameter names, shapes, linear layers and tied weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
