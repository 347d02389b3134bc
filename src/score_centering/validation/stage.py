"""The validation stage: from manifests and settings to the content of validation.json."""

import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from score_centering.data import read_split
from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.model.model_manifest import verified_folder
from score_centering.model.sources import load_folder
from score_centering.precision import listed_linears
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.names import text_part
from score_centering.rollout import Engine, LocalEngine
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.vllm import VllmEngine
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.stages import ValidationStage
from score_centering.validation.gaps import allowed_head_sizes
from score_centering.validation.measure import BF16, INT8, INT8_INT4KV, Plan, Subject, measure
from score_centering.validation.w8a8_checkpoint import check_scheme, check_tensors, read_weights

ENGINE_SLOTS = 64
FORWARD_ROLLOUTS = 32


def validate_checkpoint(
    stage: ValidationStage, dataset_manifest: Path, model_manifest: Path, w8a8_config: Path
) -> dict[str, Any]:
    """Measure the W8A8 checkpoint beside `w8a8_config` against its BF16 model, on held-out prompts.

    Raises:
        UserError: a manifest that does not hold, or a checkpoint that is not what its configuration says.
    """
    subject, config = read_subject(stage, dataset_manifest, model_manifest, w8a8_config)
    precision, vocab_size = stage.precision, subject.model.config.vocab_size
    head_sizes, notes = allowed_head_sizes(precision.head_sizes, stage.top_logprobs_num, vocab_size)
    if len(subject.prompts) < precision.prompts:
        notes.append(
            f"precision.prompts = {precision.prompts}, but only {len(subject.prompts)} held-out prompts are usable"
        )
    plan = Plan(
        rollouts=precision.rollouts,
        max_tokens=stage.max_response_length,
        temperature=stage.temperature,
        seed=precision.seed,
        head_sizes=head_sizes,
        drift_tokens=precision.drift_tokens,
        batch_size=FORWARD_ROLLOUTS,
        device=stage.runtime.device,
    )
    folders = {BF16: verified_folder(model_manifest), INT8: w8a8_config.parent}

    def make_engine(precision: str) -> Engine:
        if stage.engine == "vllm":
            return vllm_engine(stage, precision, folders, vocab_size)
        return engine_of(stage, precision, subject, config)

    result = measure(subject, plan, make_engine)
    result["notes"] = notes + result["notes"]
    result["numbers"] = {name: value if math.isfinite(value) else None for name, value in result["numbers"].items()}
    return result


def read_subject(
    stage: ValidationStage, dataset_manifest: Path, model_manifest: Path, w8a8_config: Path
) -> tuple[Subject, dict[str, Any]]:
    """The model under test with its held-out prompts, and the content of `w8a8_config`; see `validate_checkpoint`."""
    torch.set_num_threads(stage.runtime.threads)
    device = stage.runtime.device
    folder = verified_folder(model_manifest)
    config = read_json(w8a8_config)
    check_scheme(config, str(w8a8_config))
    model, tokenizer = load_folder(folder)
    model.to(device).eval()
    if device == "cpu":
        install_cpu_kernels(model)
    listed = _listed(config, model, w8a8_config)
    w8a8 = text_part(read_weights(w8a8_config.parent))
    base = untied(model.state_dict(), w8a8)
    check_tensors(base, w8a8, listed, str(w8a8_config.parent))
    prompts = [
        encode_prompt(tokenizer, problem.prompt, stage.prompt.instruction, stage.prompt.enable_thinking)
        for problem in read_split(dataset_manifest, "test")
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= stage.max_prompt_length][: stage.precision.prompts]
    if not prompts:
        raise UserError(f"data.max_prompt_length = {stage.max_prompt_length}: every held-out prompt is longer")
    subject = Subject(
        model=model,
        base=base,
        w8a8={name: tensor.to(device) for name, tensor in w8a8.items()},
        listed=listed,
        prompts=prompts,
        stop_token_ids=stop_token_ids(tokenizer),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )
    return subject, config


def untied(weights: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """`weights` with each tied tensor once, under the name that is among `names`, as a checkpoint stores it."""
    stored = {tensor.data_ptr() for name, tensor in weights.items() if name in names}
    return {name: tensor for name, tensor in weights.items() if name in names or tensor.data_ptr() not in stored}


def engine_of(
    stage: ValidationStage,
    precision: str,
    subject: Subject,
    w8a8_config: dict[str, Any],
    faults: CacheFaults | None = None,
) -> Engine:
    """A fresh local engine of `precision`, without weights."""
    return LocalEngine(
        subject.model.config,
        quantization=None if precision == BF16 else "int8",
        w8a8_config=None if precision == BF16 else w8a8_config,
        kv_cache="int4_per_token_head" if precision == INT8_INT4KV else "auto",
        max_batch=ENGINE_SLOTS,
        max_prompt_length=stage.max_prompt_length,
        max_response_length=stage.max_response_length,
        device=stage.runtime.device,
        faults=faults,
    )


def vllm_engine(stage: ValidationStage, precision: str, folders: Mapping[str, Path], vocab_size: int) -> VllmEngine:
    """A fresh vLLM engine of `precision`, without weights; `folders` hold the BF16 and the INT8 config.json.

    The exact drift needs the whole vocabulary as candidates.
    """
    return VllmEngine(
        folders[BF16 if precision == BF16 else INT8],
        kv_cache="int4_per_token_head" if precision == INT8_INT4KV else "auto",
        device=stage.runtime.device,
        max_batch=ENGINE_SLOTS,
        max_prompt_length=stage.max_prompt_length,
        max_response_length=stage.max_response_length,
        max_logprobs=vocab_size,
        **stage.vllm.model_dump(),
    )


def _listed(config: dict[str, Any], model: nn.Module, path: Path) -> list[str]:
    listed = listed_linears(config, model)
    if not listed:
        raise UserError(f"{path}: quantization_config matches no linear layer of the model")
    return listed
