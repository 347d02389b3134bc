"""The validation stage: from manifests and settings to the content of validation.json."""

import json
import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from score_centering.data import read_split
from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.model.manifest import verified_folder
from score_centering.model.sources import load_folder
from score_centering.precision import listed_linears
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.rollout import Engine, LocalEngine
from score_centering.settings import UserError
from score_centering.settings.stages import ValidationStage
from score_centering.validation.checkpoint import check_scheme, check_tensors, read_weights
from score_centering.validation.gaps import allowed_head_sizes
from score_centering.validation.measure import BF16, INT8_INT4KV, Plan, Subject, measure

ENGINE_SLOTS = 64
FORWARD_ROLLOUTS = 32


def validate_checkpoint(
    stage: ValidationStage, dataset_manifest: Path, model_manifest: Path, w8a8_config: Path
) -> dict[str, Any]:
    """Measure the W8A8 checkpoint beside `w8a8_config` against its BF16 model, on held-out prompts.

    Raises:
        UserError: a manifest that does not hold, or a checkpoint that is not what its configuration says.
    """
    if not w8a8_config.is_file():
        raise UserError(f"{w8a8_config}: no such file")
    if stage.engine != "local":
        raise UserError(f"actor_rollout_ref.rollout.name = {stage.engine!r}: only local can be validated yet")
    torch.set_num_threads(stage.runtime.threads)
    device = stage.runtime.device
    folder = verified_folder(model_manifest)
    config = json.loads(w8a8_config.read_text(encoding="utf-8"))
    check_scheme(config, str(w8a8_config))
    model, tokenizer = load_folder(folder)
    model.to(device).eval()
    if device == "cpu":
        install_cpu_kernels(model)
    listed = _listed(config, model, w8a8_config)
    w8a8 = read_weights(w8a8_config.parent)
    base = untied(model.state_dict(), w8a8)
    check_tensors(base, w8a8, listed, str(w8a8_config.parent))
    precision = stage.precision
    prompts = [
        encode_prompt(tokenizer, problem.prompt, stage.prompt.instruction, stage.prompt.enable_thinking)
        for problem in read_split(dataset_manifest, "test")
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= stage.max_prompt_length][: precision.prompts]
    if not prompts:
        raise UserError(f"data.max_prompt_length = {stage.max_prompt_length}: every held-out prompt is longer")
    head_sizes, notes = allowed_head_sizes(precision.head_sizes, stage.top_logprobs_num, model.config.vocab_size)
    if len(prompts) < precision.prompts:
        notes.append(f"precision.prompts = {precision.prompts}, but only {len(prompts)} held-out prompts are usable")
    subject = Subject(
        model=model,
        base=base,
        w8a8={name: tensor.to(device) for name, tensor in w8a8.items()},
        listed=listed,
        prompts=prompts,
        stop_token_ids=stop_token_ids(tokenizer),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )
    plan = Plan(
        rollouts=precision.rollouts,
        max_tokens=stage.max_response_length,
        temperature=stage.temperature,
        seed=precision.seed,
        head_sizes=head_sizes,
        drift_tokens=precision.drift_tokens,
        batch_size=FORWARD_ROLLOUTS,
        device=device,
    )
    engine_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    result = measure(subject, plan, lambda kind: _engine(stage, kind, engine_config, config))
    result["notes"] = notes + result["notes"]
    result["numbers"] = {name: value if math.isfinite(value) else None for name, value in result["numbers"].items()}
    return result


def untied(weights: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """`weights` with each tied tensor once, under the name that is among `names`, as a checkpoint stores it."""
    stored = {tensor.data_ptr() for name, tensor in weights.items() if name in names}
    return {name: tensor for name, tensor in weights.items() if name in names or tensor.data_ptr() not in stored}


def _engine(stage: ValidationStage, precision: str, config: PreTrainedConfig, w8a8_config: dict[str, Any]) -> Engine:
    return LocalEngine(
        config,
        quantization=None if precision == BF16 else "int8",
        w8a8_config=None if precision == BF16 else w8a8_config,
        kv_cache="int4_per_token_head" if precision == INT8_INT4KV else "auto",
        max_batch=ENGINE_SLOTS,
        max_prompt_length=stage.max_prompt_length,
        max_response_length=stage.max_response_length,
        device=stage.runtime.device,
    )


def _listed(config: dict[str, Any], model: nn.Module, path: Path) -> list[str]:
    listed = listed_linears(config, model)
    if not listed:
        raise UserError(f"{path}: quantization_config matches no linear layer of the model")
    return listed
