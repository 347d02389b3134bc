"""What the local engine needs to know of a model: sizes, layer kinds, rotary tables, parameter names and shapes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from score_centering.settings import UserError

SUPPORTED = {
    "llama": LlamaRotaryEmbedding,
    "qwen3_5_text": Qwen3_5TextRotaryEmbedding,
    "qwen3_5_moe_text": Qwen3_5TextRotaryEmbedding,
}


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
class Architecture:
    """A decoder-only model: Llama, or the hybrid text model of Qwen3.5, dense or a mixture of experts."""

    family: Literal["llama", "qwen3_5_text", "qwen3_5_moe_text"]
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[Literal["full_attention", "linear_attention"], ...]
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    linear: LinearAttention | None
    experts: Experts | None

    @property
    def gated(self) -> bool:
        """Qwen3.5: attention has an output gate, q and k are normalised, norm weights are stored as w − 1."""
        return self.family != "llama"


def read_architecture(config: PreTrainedConfig) -> Architecture:
    """The parts of a transformers config that the engine computes with; refuses what it would compute wrongly."""
    if config.model_type not in SUPPORTED:
        raise UserError(f"local engine: model_type {config.model_type!r}, allowed are {sorted(SUPPORTED)}")
    required = {"hidden_act": "silu", "attention_bias": False}
    if config.model_type == "llama":
        required["mlp_bias"] = False
    for field, allowed in required.items():
        if getattr(config, field) != allowed:
            raise UserError(f"local engine: {field} is {getattr(config, field)!r}, allowed is {allowed!r}")
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        raise UserError(f"local engine: rope_type {config.rope_parameters['rope_type']!r} changes with the length")
    hybrid = config.model_type != "llama"
    return Architecture(
        family=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_kinds=tuple(config.layer_types) if hybrid else ("full_attention",) * config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        linear=LinearAttention(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )
        if hybrid
        else None,
        experts=Experts(count=config.num_experts, top_k=config.num_experts_per_tok)
        if config.model_type == "qwen3_5_moe_text"
        else None,
    )


def rotary_table(config: PreTrainedConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, rotary dims) in BF16, as transformers' own module computes them."""
    rotary = SUPPORTED[config.model_type](config)
    index = torch.arange(positions)[None]
    if config.model_type != "llama":
        index = index.expand(3, 1, -1)  # time, height and width are one for text
    cos, sin = rotary(torch.empty(0, dtype=torch.bfloat16), index)
    return cos[0].to(device), sin[0].to(device)


def parameter_model(config: PreTrainedConfig) -> torch.nn.Module:
    """transformers' model without storage: its parameter names, shapes, linear layers and tied weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
