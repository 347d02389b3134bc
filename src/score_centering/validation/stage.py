"""The validation stage: from manifests and settings to the content of validation.json."""

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from score_centering.data import read_split
from score_centering.data.sums import answerable_share
from score_centering.model.chat import encode_prompt, read_responses, stop_token_ids
from score_centering.model.model_manifest import verified_folder
from score_centering.model.sources import load_folder
from score_centering.precision import listed_linears
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.names import text_part
from score_centering.precision.registry import UNQUANTISED_PRECISION, Precision
from score_centering.precision.requantising import identify
from score_centering.rollout import Engine
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.make_engine import EngineOptions, make_engine
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.preflight import require_device
from score_centering.settings.stages import ValidationStage
from score_centering.validation.gaps import allowed_head_sizes
from score_centering.validation.measure import Plan, Quantised, Subject, measure
from score_centering.validation.quantised_checkpoint import check_tensors, read_weights

ENGINE_SLOTS = 64
FORWARD_ROLLOUTS = 32


def validate_precisions(
    stage: ValidationStage, dataset_manifest: Path, model_manifest: Path, quantised_configs: Sequence[Path]
) -> dict[str, Any]:
    """Measure the precisions of a run against its BF16 model, on held-out prompts.

    Args:
        quantised_configs: config.json of each quantised model, in any order; one for each number format that is used.

    Raises:
        UserError: a manifest that does not hold, a checkpoint that is not what its configuration says, or none for one
            of the formats.
    """
    subject, places = read_subject(stage, dataset_manifest, model_manifest, quantised_configs)
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
        precisions=list(dict.fromkeys([UNQUANTISED_PRECISION, *used_precisions(stage)])),
    )
    # The exact drift needs the whole vocabulary as candidates.
    result = measure(subject, plan, lambda used: engine_of(stage, used, subject, places, max_logprobs=vocab_size))
    result["notes"] = notes + result["notes"]
    result["numbers"] = {name: value if math.isfinite(value) else None for name, value in result["numbers"].items()}
    return result


def used_precisions(stage: ValidationStage) -> list[Precision]:
    """What the arms' rollouts are computed in."""
    return [Precision(choice.quantization, choice.kv_cache_dtype) for choice in stage.precisions]


def read_subject(
    stage: ValidationStage, dataset_manifest: Path, model_manifest: Path, quantised_configs: Sequence[Path]
) -> tuple[Subject, dict[str | None, Path]]:
    """The model under test with its held-out prompts and quantised checkpoints, and where they lie: the BF16 model's
    folder under None, each number format's config.json under its name. See `validate_precisions`."""
    require_device(stage.runtime.device)
    torch.set_num_threads(stage.runtime.threads)
    device = stage.runtime.device
    folder = verified_folder(model_manifest, stage.engine)
    configs = {identify(read_json(path), str(path)).name: path for path in quantised_configs}
    for used in used_precisions(stage):
        if used.quantization is not None and used.quantization not in configs:
            raise UserError(f"--quantised-config: none of {used.label}, which an arm's rollouts are computed in")
    model, tokenizer = load_folder(folder)
    model.to(device).eval()
    if device == "cpu":
        install_cpu_kernels(model)
    quantised, base = {}, untied(model.state_dict(), ())
    for name, path in configs.items():
        listed = listed_linears(read_json(path), model, str(path))
        if not listed:
            raise UserError(f"{path}: quantization_config matches no linear layer of the model")
        weights = text_part(read_weights(path.parent))
        base = untied(model.state_dict(), weights)
        check_tensors(base, weights, listed, str(path.parent))
        quantised[name] = Quantised({key: tensor.to(device) for key, tensor in weights.items()}, listed)
    problems = read_split(dataset_manifest, "test")
    prompts = [
        encode_prompt(tokenizer, problem.prompt, stage.prompt.instruction, stage.prompt.enable_thinking)
        for problem in problems
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= stage.max_prompt_length][: stage.precision.prompts]
    if not prompts:
        raise UserError(f"data.max_prompt_length = {stage.max_prompt_length}: every held-out prompt is longer")
    subject = Subject(
        model=model,
        base=base,
        quantised=quantised,
        prompts=prompts,
        stop_token_ids=stop_token_ids(tokenizer, model.generation_config.eos_token_id),
        read=lambda rollouts: read_responses(tokenizer, rollouts),
        answerable_share=answerable_share(problems),
    )
    return subject, {None: folder, **configs}


def untied(weights: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """`weights` with each tied tensor once, under the name that is among `names`, as a checkpoint stores it."""
    stored = {tensor.data_ptr() for name, tensor in weights.items() if name in names}
    return {name: tensor for name, tensor in weights.items() if name in names or tensor.data_ptr() not in stored}


def engine_of(
    stage: ValidationStage,
    precision: Precision,
    subject: Subject,
    places: Mapping[str | None, Path],
    max_logprobs: int = 1,
    faults: CacheFaults | None = None,
) -> Engine:
    """A fresh engine of `precision`, without weights; `places` as from `read_subject`."""
    options = EngineOptions(
        stage.engine,
        precision,
        stage.runtime.device,
        max_batch=ENGINE_SLOTS,
        max_prompt_length=stage.max_prompt_length,
        max_response_length=stage.max_response_length,
        max_logprobs=max_logprobs,
        vllm={} if stage.vllm is None else stage.vllm.model_dump(),
        faults=faults,
    )
    quantised = None if precision.quantization is None else places[precision.quantization]
    return make_engine(options, subject.model.config, places[None], quantised)
