"""The one place where rollout engines are made: the local one and vLLM's, of any precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from score_centering.precision.registry import Precision, format_of
from score_centering.precision.requantising import identify
from score_centering.rollout.local import LocalEngine
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.vllm import VllmEngine, linear_head_size
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.preflight import require_kernel


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is asked for.

    name: `local` or `vllm`.  device: `cpu` or `cuda`.
    max_batch: sequences decoded side by side.  max_prompt_length, max_response_length: tokens.
    max_logprobs: the most candidates a position that will be asked for; vLLM only.
    vllm: `linear_backend`, `attention_backend`, `gpu_memory_utilization`; vLLM only.
    faults: damage to the KV cache.  record_routes: keep the experts of every token.  Both the local engine's only.
    """

    name: str
    precision: Precision
    device: str
    max_batch: int
    max_prompt_length: int
    max_response_length: int
    max_logprobs: int = 1
    vllm: Mapping[str, Any] = field(default_factory=dict)
    faults: CacheFaults | None = None
    record_routes: bool = False


def make_engine(
    options: EngineOptions,
    config: PreTrainedConfig,
    model_folder: Path | None = None,
    quantised_config: Path | None = None,
) -> LocalEngine | VllmEngine:
    """A fresh engine without weights.

    Args:
        config: the model's.
        model_folder: of the BF16 model; vLLM only.
        quantised_config: config.json of the quantised model, where the precision has one.

    Raises:
        UserError: the quantised model has another format, or this machine has no kernel for it.
    """
    quantised = read_quantised_config(options.precision.quantization, quantised_config)
    sizes = {
        "max_batch": options.max_batch,
        "max_prompt_length": options.max_prompt_length,
        "max_response_length": options.max_response_length,
    }
    kv_cache = options.precision.kv_cache_dtype
    if options.name == "local":
        return LocalEngine(
            config,
            quantised_config=quantised,
            kv_cache=kv_cache,
            device=options.device,
            faults=options.faults,
            record_routes=options.record_routes,
            **sizes,
        )
    if options.faults is not None:
        raise UserError("perturbation.cache_fault damages the local engine's cache: set actor_rollout_ref.rollout.name")
    if options.record_routes:
        raise UserError("actor_rollout_ref.rollout.enable_rollout_routing_replay: the local trainer needs name: local")
    check_kernel(options.precision.quantization, options.device, linear_head_size(config.to_dict()) is not None)
    return VllmEngine(
        model_folder if quantised_config is None else quantised_config.parent,
        kv_cache=kv_cache,
        device=options.device,
        max_logprobs=options.max_logprobs,
        **sizes,
        **options.vllm,
    )


def read_quantised_config(quantization: str | None, path: Path | None) -> dict[str, Any] | None:
    """The content of a quantised model's config.json; None for BF16.

    Raises:
        UserError: it is missing, or of another format than `quantization`.
    """
    if quantization is None:
        return None
    if path is None:
        raise UserError(
            f"actor_rollout_ref.rollout.quantization = {quantization!r} needs --quantised-config (the config.json of "
            "the quantised model)"
        )
    content = read_json(path)
    found = identify(content, str(path)).name
    if found != quantization:
        raise UserError(
            f"{path}: its format is {found}, but actor_rollout_ref.rollout.quantization is {quantization!r}"
        )
    return content


def check_kernel(quantization: str | None, device: str, linear_attention: bool) -> None:
    """Refuses a format that vLLM 0.25.0 has no kernel for on this GPU, or that it would decode wrongly.

    linear_attention: the model has gated linear attention, whose input projections vLLM joins but llm-compressor scales
        apart.

    Raises:
        UserError: naming the format, the GPU, and what the format needs.
    """
    if device != "cuda" or quantization is None:
        return
    if linear_attention and format_of(quantization).whole_scale:
        raise UserError(
            f"actor_rollout_ref.rollout.quantization = {quantization!r}: vLLM joins in_proj_qkv and in_proj_z of "
            "linear attention and keeps one of their two scales, so it would decode the other wrongly; use the local "
            "engine"
        )
    require_kernel(quantization, torch.cuda.get_device_capability())
