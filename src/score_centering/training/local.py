"""The local trainer: one process, small, readable, exact.

It updates FP32 masters through the BF16 model and hands the requantised weights to the engine of this process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from score_centering.model.sources import load_folder
from score_centering.precision import listed_linears, requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.noise import WeightNoise
from score_centering.reward import Scorer
from score_centering.rollout import LocalEngine, Rollout
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.vllm import VllmEngine
from score_centering.runs import RunFolder
from score_centering.runs.torch_state import restore_rng_state, rng_state
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.stages import TrainStage
from score_centering.training.arm import arm_objective
from score_centering.training.drift_meter import DriftMeter
from score_centering.training.loop import RunLoop
from score_centering.training.masters import MasterWeights
from score_centering.training.task import Inputs, Task
from score_centering.training.transport import ExternalGateway, open_transport
from score_centering.training.update import Updater

SAMPLER = "sampler."  # of a stale sampler's weights in a checkpoint


def train_locally(
    run: RunFolder,
    stage: TrainStage,
    arm: str,
    seed: int,
    inputs: Inputs,
    gateway: ExternalGateway | None = None,
) -> None:
    """Train one arm with one seed in the owned folder `run`, from its last checkpoint on, and publish the results.

    gateway: what rollouts go through instead of one in this process, where `rollout.transport` is `gateway`.

    Raises:
        UserError: settings or inputs that can't be used, a non-finite update where the configuration says stop.
    """
    torch.set_num_threads(stage.runtime.threads)
    torch.manual_seed(seed)
    model, tokenizer = load_folder(inputs.model_folder)
    task = Task(stage, seed, inputs, tokenizer, model.config.vocab_size)
    trainer = LocalTrainer(stage, arm, seed, inputs, model)
    with (
        Scorer(stage.runtime.reward_workers, stage.runtime.reward_timeout_seconds) as scorer,
        open_transport(stage, trainer.engine, task, gateway) as generate,
    ):
        RunLoop(run, stage, task, trainer, generate, scorer).go(arm, seed)
    trainer.engine.close()


class LocalTrainer:
    """Model, masters and rollout engine in this process; see `loop.Trainer`."""

    def __init__(self, stage: TrainStage, arm: str, seed: int, inputs: Inputs, model: PreTrainedModel) -> None:
        actor, rollout = stage.actor_rollout_ref.actor, stage.actor_rollout_ref.rollout
        self.model = model.to(stage.runtime.device).requires_grad_(True)
        if stage.runtime.device == "cpu":
            install_cpu_kernels(model)
        self.masters = MasterWeights(model, actor.optim)
        objective = arm_objective(stage, arm)
        names = dict(model.named_parameters())
        self.meter = DriftMeter(names, objective, stage.trainer.drift_freq, rollout.temperature)
        self.updater = Updater(
            model, self.masters, objective, actor, rollout.temperature, stage.trainer.nonfinite, self.meter
        )
        w8a8 = w8a8_config(stage, inputs.w8a8_config)
        self.listed = [] if w8a8 is None else listed_linears(w8a8, model)
        self.noise = _noise(stage, seed)
        if rollout.name == "vllm":
            self.engine: LocalEngine | VllmEngine = _vllm_engine(stage, inputs)
        else:
            self.engine = _local_engine(stage, model.config, w8a8, seed)
        self._stage, self._clean = stage, None
        self._held: tuple[int, dict[str, Tensor]] | None = None  # weights of a stale sampler, and their step
        self._synced: int | None = None

    def update(self, rollouts: Sequence[Rollout], gains: Tensor, step: int) -> dict[str, Any]:
        return self.updater.update(rollouts, gains, step)

    def sync(self, step: int) -> None:
        """Requantise the BF16 weights of the trainer's forward once and hand those bytes to the engine."""
        self._hand_over(self.weights(), step)

    def hold(self, step: int) -> None:
        self._held = step, {name: value.clone() for name, value in self.weights().items()}

    def sync_held(self) -> None:
        step, weights = self._held
        if self._synced != step:
            self._hand_over(weights, step)

    def clean_engine(self, step: int) -> LocalEngine:
        """A local engine in BF16, made when it is first asked for."""
        if self._clean is None:
            self._clean = _clean_engine(self._stage, self.model.config)
        self._clean.sync(self.weights(), step)
        return self._clean

    def resume(self, run: RunFolder) -> int | None:
        found = run.resume()
        if found is None:
            return None
        step, tensors, scalars = found
        self.masters.restore(tensors)
        self.meter.sum.restore(tensors)
        restore_rng_state(tensors, scalars)
        if "sampler_step" in scalars:
            held = {name.removeprefix(SAMPLER): value for name, value in tensors.items() if name.startswith(SAMPLER)}
            self._held = scalars["sampler_step"], {name: value.to(self.model.device) for name, value in held.items()}
        return step

    def save(self, run: RunFolder, step: int) -> None:
        tensors, scalars = rng_state()
        tensors |= self.masters.tensors() | self.meter.sum.tensors()
        if self._held is not None and self._held[0] != step:
            scalars["sampler_step"] = self._held[0]
            tensors |= {f"{SAMPLER}{name}": value for name, value in self._held[1].items()}
        run.save_checkpoint(step, tensors, scalars)

    def weights(self) -> dict[str, Tensor]:
        """The BF16 weights of the forward by name; they change with the next update."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def _hand_over(self, weights: dict[str, Tensor], step: int) -> None:
        if self.noise is not None:
            weights = self.noise.apply(weights)
        self.engine.sync(requantise(weights, self.listed), step)
        self._synced = step


def _vllm_engine(stage: TrainStage, inputs: Inputs) -> VllmEngine:
    rollout, data = stage.actor_rollout_ref.rollout, stage.data
    if stage.perturbation is not None and stage.perturbation.cache_fault is not None:
        raise UserError("perturbation.cache_fault damages the local engine's cache: set actor_rollout_ref.rollout.name")
    if rollout.enable_rollout_routing_replay:
        raise UserError("actor_rollout_ref.rollout.enable_rollout_routing_replay: the local trainer needs name: local")
    arguments = rollout.engine_kwargs.vllm
    return VllmEngine(
        inputs.model_folder if rollout.quantization is None else inputs.w8a8_config.parent,
        kv_cache=arguments.kv_cache_dtype,
        device=stage.runtime.device,
        max_batch=rollout.max_num_seqs,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_logprobs=max(1, stage.score_centering.candidates),
        linear_backend=arguments.linear_backend,
        attention_backend=arguments.attention_backend,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
    )


def _local_engine(stage: TrainStage, model_config: Any, w8a8: dict | None, seed: int) -> LocalEngine:
    rollout = stage.actor_rollout_ref.rollout
    return LocalEngine(
        model_config,
        quantization=rollout.quantization,
        w8a8_config=w8a8,
        kv_cache=rollout.engine_kwargs.vllm.kv_cache_dtype,
        max_batch=rollout.max_num_seqs,
        max_prompt_length=stage.data.max_prompt_length,
        max_response_length=stage.data.max_response_length,
        device=stage.runtime.device,
        faults=_faults(stage, seed),
        record_routes=rollout.enable_rollout_routing_replay,
    )


def _clean_engine(stage: TrainStage, model_config: Any) -> LocalEngine:
    return LocalEngine(
        model_config,
        quantization=None,
        w8a8_config=None,
        kv_cache="auto",
        max_batch=min(stage.actor_rollout_ref.rollout.max_num_seqs, stage.data.val_batch_size),
        max_prompt_length=stage.data.max_prompt_length,
        max_response_length=stage.data.max_response_length,
        device=stage.runtime.device,
    )


def _faults(stage: TrainStage, seed: int) -> CacheFaults | None:
    fault = stage.perturbation.cache_fault if stage.perturbation else None
    return CacheFaults(fault.rate, fault.kind, fault.transient, seed) if fault else None


def _noise(stage: TrainStage, seed: int) -> WeightNoise | None:
    relative = stage.perturbation.weight_noise if stage.perturbation else 0.0
    return WeightNoise(relative, seed) if relative else None


def w8a8_config(stage: TrainStage, path: Path | None) -> dict | None:
    """The prepared W8A8 config.json, which lists the layers that the rollouts run in INT8; None for BF16 rollouts."""
    if stage.actor_rollout_ref.rollout.quantization is None:
        return None
    if path is None:
        raise UserError("INT8 rollouts need --w8a8-config (the config.json of the prepared W8A8 model)")
    return read_json(path)
