"""The model stage: base weights by their pin, warm-started where the configuration asks for it."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from score_centering.data import Problem, read_split
from score_centering.data.sums import answerable_share
from score_centering.model.chat import encode_prompt, read_responses, stop_token_ids
from score_centering.model.model_manifest import SCHEMA_VERSION, ModelManifest, digest_folder
from score_centering.model.scratch import build_model, train_tokenizer
from score_centering.model.sources import hub_snapshot, load_folder, load_gguf, local_folder, package_file
from score_centering.model.warm_start import Example, Sampled, WarmStartResult, warm_start
from score_centering.model.worked import worked_solution
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.registry import UNQUANTISED_PRECISION
from score_centering.reward import Scorer
from score_centering.rollout import Sampling, mean_response_length, sampled_entropy
from score_centering.rollout.make_engine import EngineOptions, make_engine
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file
from score_centering.settings.preflight import require_architecture, require_device
from score_centering.settings.stages import ModelStage

Report = Callable[[int, float, float], None]


def prepare_model(stage: ModelStage, dataset_manifest: Path, output_dir: Path, report: Report) -> ModelManifest:
    """Base weights of `stage.model`, below `output_dir` unless they are referenced where they lie.

    A hub snapshot or local folder that needs no warm start is referenced, never copied; everything else is saved in
    BF16 to `output_dir`. `report` is called with (step, loss, sampled reward) at each measurement of the warm start.

    Raises:
        UserError: the source cannot be had, or the warm start ends outside its reward band.
    """
    model_settings = stage.model
    source: dict[str, Any] = {
        "kind": model_settings.source,
        **getattr(model_settings, model_settings.source).model_dump(mode="json"),
    }
    referenced: Path | None = None
    if model_settings.source == "hub":
        referenced = hub_snapshot(model_settings.hub).resolve()
        source["commit"] = referenced.name
    elif model_settings.source == "path":
        referenced = local_folder(model_settings.path).resolve()
    if referenced is not None and model_settings.warm_start.max_steps == 0:
        return _manifest(stage, source, referenced, str(referenced), None, [], None)

    require_device(stage.runtime.device)
    if referenced is not None:
        require_architecture(referenced, "local")  # a warm start samples through it
    torch.set_num_threads(stage.runtime.threads)
    problems = read_split(dataset_manifest, "train")
    model, tokenizer = _load(stage, problems, referenced)
    result = None
    if model_settings.warm_start.max_steps:
        result = _warm_start(stage, model, tokenizer, problems, report)
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return _manifest(stage, source, output_dir, output_dir.name, result, problems, sha256_file(dataset_manifest))


def _load(
    stage: ModelStage, problems: Sequence[Problem], referenced: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (FP32, on the stage's device) and tokenizer of the chosen source."""
    settings = stage.model
    if settings.source == "scratch":
        solution = worked_solution(settings.warm_start)
        texts = [f"user\n{problem.prompt}\n{stage.prompt.instruction}" for problem in problems]
        texts += [f"assistant\n{solution(problem)}" for problem in problems]
        tokenizer = train_tokenizer(texts, settings.scratch.tokenizer.vocab_size)
        model = build_model(settings.scratch, tokenizer)
    elif settings.source == "package":
        model, tokenizer = load_gguf(package_file(settings.package), settings.package.chat_template)
    else:
        model, tokenizer = load_folder(referenced, torch.float32)
    return model.float().to(stage.runtime.device), tokenizer


def _warm_start(
    stage: ModelStage,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    report: Report,
) -> WarmStartResult:
    options = stage.model.warm_start
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    examples = [_example(stage, tokenizer, problem, stop_ids[0]) for problem in problems]
    too_long = sum(
        len(e.prompt) > stage.max_prompt_length or len(e.response) > stage.max_response_length for e in examples
    )
    if too_long:
        raise UserError(
            f"model.warm_start: {too_long} of {len(examples)} worked problems exceed data.max_prompt_length = "
            f"{stage.max_prompt_length} or data.max_response_length = {stage.max_response_length} tokens "
            f"(longest: {max(len(e.prompt) for e in examples)} and {max(len(e.response) for e in examples)})"
        )
    checked = problems[: options.check_prompts]
    prompts = [example.prompt for example in examples[: options.check_prompts]]
    sampling = Sampling(1.0, stage.max_response_length, False, stop_ids)
    wanted = EngineOptions(
        "local",
        UNQUANTISED_PRECISION,
        stage.runtime.device,
        max_batch=len(prompts),
        max_prompt_length=stage.max_prompt_length,
        max_response_length=stage.max_response_length,
    )
    engine = make_engine(wanted, model.config)
    if stage.runtime.device == "cpu":
        install_cpu_kernels(model)

    with Scorer(stage.runtime.reward_workers, stage.runtime.reward_timeout_seconds) as scorer:

        def sample() -> Sampled:
            engine.sync({name: value.bfloat16() for name, value in model.state_dict().items()}, step=0)
            rollouts = engine.generate(prompts, n=1, sampling=sampling, seed=options.seed, top_logprobs=0)
            texts, thinking = read_responses(tokenizer, rollouts)
            cut = [rollout.finish_reason == "length" for rollout in rollouts]
            answers = [problem.answer for problem in checked]
            rewards = scorer.score(texts, answers, cut, thinking).rewards
            return Sampled(float(rewards.mean()), sampled_entropy(rollouts), mean_response_length(rollouts))

        result = warm_start(model, examples, options, sample, report)
    engine.close()
    return result


def _example(stage: ModelStage, tokenizer: PreTrainedTokenizerBase, problem: Problem, end_of_turn: int) -> Example:
    prompt = encode_prompt(tokenizer, problem.prompt, stage.prompt.instruction, stage.prompt.enable_thinking)
    text = worked_solution(stage.model.warm_start)(problem)
    response = [*tokenizer.encode(text, add_special_tokens=False), end_of_turn]
    return Example(tuple(prompt), tuple(response))


def _manifest(
    stage: ModelStage,
    source: dict[str, Any],
    folder: Path,
    path: str,
    result: WarmStartResult | None,
    problems: Sequence[Problem],
    dataset_sha256: str | None,
) -> ModelManifest:
    warm = None
    if result is not None:
        measured = [{"step": step, "loss": loss, "reward": reward} for step, loss, reward in result.measured]
        warm = {
            **stage.model.warm_start.model_dump(mode="json"),
            "steps": result.steps,
            "sampled_reward": result.sampled.reward,
            "sampled_entropy": result.sampled.entropy,
            "sampled_response_length": result.sampled.response_length,
            "answerable_share": answerable_share(problems),
            "measured": measured,
        }
    return ModelManifest(
        schema_version=SCHEMA_VERSION,
        source=source,
        path=path,
        files=digest_folder(folder),
        parameters=_count_parameters(folder),
        warm_start=warm,
        dataset_sha256=dataset_sha256,
        versions={name: version(name) for name in ("torch", "transformers", "tokenizers")},
    )


def _count_parameters(folder: Path) -> int:
    """Elements of all tensors in the folder's safetensors files, read from their headers."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (the handle is no mapping)
                shape = tensors.get_slice(name).get_shape()
                total += torch.Size(shape).numel()
    return total
