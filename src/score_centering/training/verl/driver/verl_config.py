"""verl's configuration of a training run: its own defaults, with this project's settings laid over them.

Nothing is started and verl is not imported: its package carries the resolved defaults as one YAML file, so Hydra's
command line is not needed.
"""

import importlib.util
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from score_centering.precision.registry import format_of
from score_centering.settings import UserError
from score_centering.settings.load import read_yaml
from score_centering.settings.stages import TrainStage

VERL_VERSION = "0.8.0"
DEFAULTS = "trainer/config/_generated_ppo_trainer.yaml"
LEGACY = ("reward_model", "custom_reward_function", "sandbox_fusion")  # verl's entry point drops them too
PLUGIN = "score_centering.training.verl.plugin"
AGENT_LOOP = "score_centering_single_turn"
MIN_BATCHED_TOKENS = 8192  # verl's default: prompts that vLLM reads at once
AGENT_LOOP_MANAGER = "score_centering.training.verl.agent_loop.Manager"


def verl_config(
    stage: TrainStage, arm: str, seed: int, model_folder: Path, quantised_config: Path | None
) -> DictConfig:
    """The configuration that verl runs with, interpolations resolved.

    Raises:
        UserError: verl is missing or of another version, or a setting that verl can't honour.
    """
    _check_division(stage)
    defaults = OmegaConf.create(read_yaml(_package_folder() / DEFAULTS))
    for key in LEGACY:
        del defaults[key]
    OmegaConf.set_struct(defaults, True)
    for path in OPEN:
        OmegaConf.set_struct(OmegaConf.select(defaults, path), False)
    try:
        config = OmegaConf.merge(defaults, _overlay(stage, arm, seed, model_folder, quantised_config))
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise UserError(f"verl's configuration: {' '.join(str(error).split())}") from None
    return config


def _package_folder() -> Path:
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise UserError("trainer.name: verl is not installed (docs/full-scale.md tells how), or choose local") from None
    if found != VERL_VERSION:
        raise UserError(f"trainer.name: verl {found} is installed, this project is made for verl {VERL_VERSION}")
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _check_division(stage: TrainStage) -> None:
    rollouts = (
        stage.data.train_batch_size * stage.actor_rollout_ref.rollout.n // stage.actor_rollout_ref.actor.mini_batches
    )
    ranks = stage.trainer.nnodes * stage.trainer.n_gpus_per_node
    if rollouts % ranks:
        raise UserError(
            f"trainer.nnodes · trainer.n_gpus_per_node = {ranks}: must divide the {rollouts} rollouts of an update "
            "(data.train_batch_size · actor_rollout_ref.rollout.n / actor_rollout_ref.actor.mini_batches)"
        )


def micro_batch_size(rollouts: int, most: int) -> int:
    """The largest size of equal micro-batches of `rollouts` that is at most `most`; how a batch is split changes
    nothing but memory."""
    return max(size for size in range(1, min(rollouts, most) + 1) if rollouts % size == 0)


# Blocks of verl's defaults that take keys of their engine or class.
OPEN = (
    "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "actor_rollout_ref.model.override_config",
)


def _overlay(
    stage: TrainStage, arm: str, seed: int, model_folder: Path, quantised_config: Path | None
) -> dict[str, Any]:
    data, actor, rollout = stage.data, stage.actor_rollout_ref.actor, stage.actor_rollout_ref.rollout
    greedy = rollout.val_kwargs
    cuda = stage.runtime.device == "cuda"
    ranks = stage.trainer.nnodes * stage.trainer.n_gpus_per_node
    longest = data.max_prompt_length + data.max_response_length
    return {
        "algorithm": {
            "adv_estimator": stage.algorithm.adv_estimator,
            "norm_adv_by_std_in_grpo": stage.algorithm.normalise == "std",
        },
        "data": {
            "train_batch_size": data.train_batch_size,
            "val_batch_size": data.val_batch_size,
            "max_prompt_length": data.max_prompt_length,
            "max_response_length": data.max_response_length,
            "seed": seed,
        },
        "actor_rollout_ref": {
            "model": {
                "path": str(model_folder),
                "external_lib": PLUGIN,
                "use_remove_padding": True,
                "enable_gradient_checkpointing": cuda,
                "override_config": {"attn_implementation": "sdpa"},
            },
            "actor": {
                "strategy": actor.strategy,
                "fsdp_config": {
                    "strategy": actor.strategy,
                    "model_dtype": "fp32",
                    "dtype": "bfloat16",
                    "use_torch_compile": False,
                    "seed": seed,
                    **actor.fsdp_config.model_dump(),
                },
                "optim": _optimiser(stage),
                "ppo_mini_batch_size": max(1, data.train_batch_size // actor.mini_batches),
                "ppo_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
                "ppo_epochs": actor.ppo_epochs,
                "loss_agg_mode": actor.loss_agg_mode,
                "clip_ratio_low": actor.clip_ratio_low,
                "clip_ratio_high": actor.clip_ratio_high,
                "grad_clip": _grad_clip(stage),
                "use_torch_compile": False,
            },
            "rollout": {
                "name": rollout.name,
                "n": rollout.n,
                "temperature": rollout.temperature,
                "dtype": rollout.dtype,
                "tensor_model_parallel_size": 1,
                "max_model_len": longest,
                # Prompts are read whole: `rollout.vllm` tells why.
                "enable_chunked_prefill": False,
                "enable_prefix_caching": False,
                "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, longest),
                "max_num_seqs": rollout.max_num_seqs,
                "gpu_memory_utilization": rollout.gpu_memory_utilization,
                "quantization": rollout.quantization,
                "quantization_config_file": None if quantised_config is None else str(quantised_config),
                "calculate_log_probs": True,
                "logprobs_mode": "processed_logprobs",
                "log_prob_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
                "engine_kwargs": {
                    "vllm": {
                        **rollout.engine_kwargs.vllm.model_dump(),
                        "linear_backend": _linear_backend(stage),
                        "max_logprobs": max(1, stage.score_centering.candidates),
                    }
                },
                "agent": {
                    "num_workers": 8 if cuda else 1,
                    "default_agent_loop": AGENT_LOOP,
                    "agent_loop_manager_class": AGENT_LOOP_MANAGER,
                },
                "val_kwargs": {"temperature": 0, "do_sample": greedy.do_sample, "n": greedy.n},
            },
        },
        "reward": {"num_workers": 0},
        "trainer": {
            "device": stage.runtime.device,
            "nnodes": stage.trainer.nnodes,
            "n_gpus_per_node": stage.trainer.n_gpus_per_node,
            "total_training_steps": stage.trainer.total_training_steps,
            "test_freq": stage.trainer.test_freq,
            "save_freq": stage.trainer.save_freq,
            "val_before_train": stage.trainer.val_before_train,
            "project_name": f"score-centering-{stage.experiment}",
            "experiment_name": f"{arm}-seed{seed}",
            "logger": [],
            "balance_batch": False,
            "resume_mode": "disable",
        },
        "ray_kwargs": {"ray_init": {"num_cpus": None if cuda else 4 + ranks}},
    }


def _linear_backend(stage: TrainStage) -> str:
    rollout = stage.actor_rollout_ref.rollout
    return rollout.engine_kwargs.vllm.linear_backend or format_of(rollout.quantization).linear_backend


def _optimiser(stage: TrainStage) -> dict[str, Any]:
    actor = stage.actor_rollout_ref.actor
    optim = actor.optim
    adamw = {"betas": list(optim.betas), "override_optimizer_config": {"eps": optim.eps}}
    return {
        "optimizer": {"adamw": "AdamW", "sgd": "SGD"}[optim.name],
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "lr_warmup_steps": optim.lr_warmup_steps,
        "clip_grad": _grad_clip(stage),
        "total_training_steps": stage.trainer.total_training_steps,
        **(adamw if optim.name == "adamw" else {}),
    }


def _grad_clip(stage: TrainStage) -> float:
    """verl asks for a number; a gradient of finite norm times min(1, inf / norm) is itself."""
    largest = stage.actor_rollout_ref.actor.grad_clip
    return math.inf if largest is None else largest
