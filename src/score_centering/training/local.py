"""The local trainer: one process, small, readable, exact.

It updates FP32 masters through the BF16 model and hands the requantised weights to the engine of this process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from score_centering.model.sources import load_folder
from score_centering.precision import listed_linears, requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.noise import WeightNoise
from score_centering.precision.registry import UNQUANTISED_PRECISION
from score_centering.reward import Scorer
from score_centering.rollout import Rollout, StreamEngine
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.make_engine import EngineOptions, make_engine, read_quantised_config
from score_centering.runs import RunFolder
from score_centering.runs.torch_state import restore_rng_state, rng_state
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.arm import arm_objective
from score_centering.training.drift_meter import DriftMeter
from score_centering.training.exact_sampler import ExactSampler
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
        quantised = read_quantised_config(rollout.quantization, inputs.quantised_config)
        self.listed = {} if quantised is None else listed_linears(quantised, model, str(inputs.quantised_config))
        self.noise = _noise(stage, seed)
        options = engine_options(stage, seed)
        engine = make_engine(options, model.config, inputs.model_folder, inputs.quantised_config)
        self.engine = ExactSampler(engine, self.updater) if rollout.exact else engine
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

    def clean_engine(self, step: int) -> StreamEngine:
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
        try:
            stored = requantise(weights, self.listed)
        except ValueError as error:
            raise UserError(f"weights after update {step}: {error}; the last checkpoint is kept") from None
        self.engine.sync(stored, step)
        self._synced = step


def engine_options(stage: TrainStage, seed: int) -> EngineOptions:
    """What a run's engine is asked for."""
    rollout, data = stage.actor_rollout_ref.rollout, stage.data
    arguments = rollout.engine_kwargs.vllm
    return EngineOptions(
        rollout.name,
        rollout.precision,
        stage.runtime.device,
        max_batch=rollout.max_num_seqs,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_logprobs=max(1, stage.score_centering.candidates),
        vllm={
            "linear_backend": arguments.linear_backend,
            "attention_backend": arguments.attention_backend,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
        },
        faults=_faults(stage, seed),
        record_routes=rollout.enable_rollout_routing_replay,
    )


def _clean_engine(stage: TrainStage, model_config: Any) -> StreamEngine:
    options = EngineOptions(
        "local",
        UNQUANTISED_PRECISION,
        stage.runtime.device,
        max_batch=min(stage.actor_rollout_ref.rollout.max_num_seqs, stage.data.val_batch_size),
        max_prompt_length=stage.data.max_prompt_length,
        max_response_length=stage.data.max_response_length,
    )
    return make_engine(options, model_config)


def _faults(stage: TrainStage, seed: int) -> CacheFaults | None:
    fault = stage.perturbation.cache_fault if stage.perturbation else None
    return CacheFaults(fault.rate, fault.kind, fault.transient, seed) if fault else None


def _noise(stage: TrainStage, seed: int) -> WeightNoise | None:
    done = stage.perturbation
    return WeightNoise(done.weight_noise, seed, done.noisy_embedding) if done and done.weight_noise else None
