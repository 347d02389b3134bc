"""What each stage of the pipeline depends on: the settings a job is rerun for, no more."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from score_centering.precision.registry import FORMATS, Precision
from score_centering.settings.block import Block
from score_centering.settings.dataset_blocks import Dataset, PromptSettings
from score_centering.settings.dotted import deep_merge
from score_centering.settings.gate_blocks import Limit, PrecisionSettings
from score_centering.settings.model import Figures, Settings
from score_centering.settings.model_blocks import Model, Quantization
from score_centering.settings.model_name import model_name
from score_centering.settings.study_blocks import CollapseGrid, Conditions, Drift, Perturbation, check_perturbation
from score_centering.settings.training_blocks import (
    ActorRolloutRef,
    Algorithm,
    Data,
    RolloutSettings,
    Runtime,
    ScoreCentering,
    TrainerSettings,
)


class Stage(Block):
    """Settings of one stage; `of` picks them from a whole configuration."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The fields of this stage that are blocks of `settings` by the same name."""
        return cls(**{name: getattr(settings, name) for name in cls.model_fields})

    def to_json(self) -> str:
        """One sorted JSON line, equal for equal settings."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


class DatasetStage(Stage):
    dataset: Dataset


class ModelStage(Stage):
    model: Model
    prompt: PromptSettings
    runtime: Runtime
    max_prompt_length: int
    max_response_length: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            model=settings.model,
            prompt=settings.prompt,
            runtime=settings.runtime,
            max_prompt_length=settings.data.max_prompt_length,
            max_response_length=settings.data.max_response_length,
        )


class QuantizationStage(Stage):
    """The preparation of one quantised checkpoint. format: as `rollout.quantization`; None: there is nothing to do."""

    format: str | None
    quantization: Quantization

    @classmethod
    def of(cls, settings: Settings, format_name: str | None = None) -> Self:
        """`format_name`: the rollouts' own unless given."""
        chosen = format_name or settings.actor_rollout_ref.rollout.quantization
        return cls(format=chosen, quantization=settings.quantization)


class PrecisionChoice(Block):
    """See `precision.registry.Precision`."""

    quantization: str | None
    kv_cache_dtype: str


class Machine(Block):
    """Where something is computed, without how answers are scored."""

    device: str
    threads: int


class VllmOptions(Block):
    linear_backend: str | None
    attention_backend: str
    gpu_memory_utilization: float


class ValidationStage(Stage):
    precision: PrecisionSettings
    prompt: PromptSettings
    runtime: Machine
    engine: str
    vllm: VllmOptions | None  # of engine vllm only
    top_logprobs_num: int
    temperature: float
    precisions: list[PrecisionChoice]  # of the arms that run
    max_prompt_length: int
    max_response_length: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        rollout = settings.actor_rollout_ref.rollout
        arguments = rollout.engine_kwargs.vllm
        vllm = VllmOptions(
            linear_backend=arguments.linear_backend,
            attention_backend=arguments.attention_backend,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
        )
        return cls(
            precision=settings.precision.model_copy(update={"limits": {}, "limits_of": {}}),
            prompt=settings.prompt,
            runtime=Machine(device=settings.runtime.device, threads=settings.runtime.threads),
            engine=rollout.name,
            vllm=vllm if rollout.name == "vllm" else None,
            top_logprobs_num=settings.score_centering.top_logprobs_num,
            temperature=rollout.temperature,
            precisions=[
                PrecisionChoice(quantization=used.quantization, kv_cache_dtype=used.kv_cache_dtype)
                for used in precisions_of_arms(settings)
            ],
            max_prompt_length=settings.data.max_prompt_length,
            max_response_length=settings.data.max_response_length,
        )


def precisions_of_arms(settings: Settings) -> list[Precision]:
    """The precisions of the arms that run, each once, in the arms' order."""
    rollout = settings.actor_rollout_ref.rollout.model_dump()
    found = []
    for arm in settings.run.arms:
        overrides = settings.overrides_of(arm).get("actor_rollout_ref", {}).get("rollout", {})
        found.append(RolloutSettings.model_validate(deep_merge(rollout, overrides)).precision)
    return list(dict.fromkeys(found))


class PrecisionGateStage(Stage):
    """A limit that is null takes a format's own limit away. model: whose limits these are.  measured: whether any were
    measured on it; otherwise only what must hold for any model is judged, and its weights' error is not known."""

    limits: dict[str, Limit | None]
    model: str | None = None
    measured: bool = True

    @classmethod
    def of(cls, settings: Settings) -> Self:
        precision, model = settings.precision, model_name(settings)
        own = precision.limits_of.get(model)
        return cls(limits=(UNKNOWN if own is None else own) | precision.limits, model=model, measured=own is not None)


UNKNOWN: dict[str, Limit | None] = {"*.weights.relative": None}
"""The format's own limit that a model of unusual weights may break."""


class SmokeGateStage(Stage):
    limits: dict[str, Limit]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        smoke = settings.smoke
        return cls(limits=_judged(smoke.limits_of.get(model_name(settings), {}) | smoke.limits))


class TrainStage(Stage):
    """One training run: an arm's resolved settings (see `load.resolve`), without those of other stages."""

    experiment: str
    prompt: PromptSettings
    score_centering: ScoreCentering
    algorithm: Algorithm
    data: Data
    actor_rollout_ref: ActorRolloutRef
    trainer: TrainerSettings
    runtime: Runtime
    perturbation: Perturbation | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _perturbs_what_it_can(self) -> Self:
        check_perturbation(self.perturbation, self.trainer)
        return self

    @classmethod
    def of(cls, settings: Settings, perturbation: Perturbation | None = None) -> Self:
        fields = {name: getattr(settings, name) for name in cls.model_fields if name != "perturbation"}
        return cls(**fields, perturbation=perturbation or settings.perturbation)

    def identity(self) -> dict[str, Any]:
        """What of this a run's identity holds: everything but where its progress is shown."""
        return self.model_dump(mode="json", exclude={"trainer": {"logger"}})

    def on_the_console(self) -> Self:
        """The same run, shown on the console only: equal for all of `trainer.logger`."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"logger": ["console"]})})

    def quantised_config(self, results: Path) -> Path | None:
        """The config.json that the rollouts are quantised by, in the experiment's folder unless it is configured; None:
        BF16 rollouts."""
        return quantised_config(self.actor_rollout_ref.rollout, results)


class GatewayStage(Stage):
    """What the gateway forces on every request. model_name: what the upstream calls its model."""

    model_name: str
    prompt: PromptSettings
    score_centering: ScoreCentering
    data: Data
    actor_rollout_ref: ActorRolloutRef

    @classmethod
    def of(cls, settings: Settings) -> Self:
        hub = settings.model.hub if settings.model.source == "hub" else None
        return cls(
            model_name=settings.experiment if hub is None else hub.repo,
            prompt=settings.prompt,
            score_centering=settings.score_centering,
            data=settings.data,
            actor_rollout_ref=settings.actor_rollout_ref,
        )


class FiguresStage(Stage):
    experiment: str
    figures: Figures
    arms: list[str]
    seeds: list[int]
    control: str | None
    descriptions: dict[str, str]
    labels: dict[str, str] = Field(default={}, exclude_if=lambda labels: not labels)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            experiment=settings.experiment,
            figures=settings.figures,
            arms=settings.run.arms,
            seeds=settings.run.seeds,
            control=settings.run.control,
            descriptions={arm: settings.arms[arm].description for arm in settings.run.arms},
            labels={arm: label for arm in settings.run.arms if (label := settings.arms[arm].label) is not None},
        )


class DriftStage(Stage):
    """The runs without a learning signal. `train` is the centred variant; the others differ in centering and K."""

    train: TrainStage
    drift: Drift

    @classmethod
    def of(cls, settings: Settings) -> Self:
        drift, rollout, actor = settings.drift, settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.actor
        actor = actor.model_copy(
            update={"optim": drift.optim, "policy_loss": "score_centering", "loss_agg_mode": "token-mean"}
        )
        normal = TrainStage.of(settings).on_the_console()
        train = normal.model_copy(
            update={
                "actor_rollout_ref": ActorRolloutRef(actor=actor, rollout=rollout.model_copy(update={"n": drift.n})),
                "data": settings.data.model_copy(
                    update={"train_batch_size": drift.train_batch_size, "val_batch_size": drift.check_prompts}
                ),
                "score_centering": ScoreCentering(centering=True),
                "trainer": normal.trainer.model_copy(update={"drift_freq": -1}),
            }
        )
        return cls(train=train, drift=drift)


class FaultCheckStage(Stage):
    """The repeatability check under faults: `validation` says what is generated, `limits` what a gate allows."""

    validation: ValidationStage
    precision: PrecisionChoice
    kinds: list[str]
    rates: list[float]
    limits: dict[str, Limit]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        limits, rollout = PrecisionGateStage.of(settings).limits, settings.actor_rollout_ref.rollout
        names = {f"{rollout.precision.name}.{name}": f"*.{name}" for name in FAULT_LIMITS}
        own = {f"{rollout.precision.name}.{name}": Limit(**limit) for name, limit in REPEAT_LIMITS.items()}
        found = {name: limits.get(name, limits.get(every, own.get(name))) for name, every in names.items()}
        return cls(
            validation=ValidationStage.of(settings),
            precision=PrecisionChoice(
                quantization=rollout.quantization, kv_cache_dtype=rollout.engine_kwargs.vllm.kv_cache_dtype
            ),
            kinds=settings.faults.kinds,
            rates=settings.faults.rates,
            limits={name: limit for name, limit in found.items() if limit is not None},
        )


class CollapseStage(Stage):
    """What the map of the collapse is drawn by, without the definitions of its conditions."""

    grid: CollapseGrid
    control: str
    reference: Conditions
    arms: list[str]
    seeds: list[int]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(**{name: getattr(settings.collapse, name) for name in cls.model_fields})


REPEAT_LIMITS: dict[str, dict[str, float]] = {
    "repeat.equal_tokens_share": {"min": 1},
    "repeat.not_finite_logprobs": {"max": 0},
}
"""Of any precision, unless `precision.limits` says otherwise."""
FAULT_LIMITS = ("repeat.equal_tokens_share", "repeat.not_finite_logprobs", "k3_kl", "abs_logprob_gap_mean")


def quantised_config(rollout: RolloutSettings, results: Path) -> Path | None:
    """See `TrainStage.quantised_config`."""
    if rollout.quantization is None:
        return None
    folder = FORMATS[rollout.quantization].folder
    return Path(rollout.quantization_config_file or results / f"model/{folder}/config.json")


def _judged(limits: dict[str, Limit | None]) -> dict[str, Limit]:
    return {name: limit for name, limit in limits.items() if limit is not None}


STAGES: dict[str, type[Stage]] = {
    "dataset": DatasetStage,
    "model": ModelStage,
    "quantization": QuantizationStage,
    "validation": ValidationStage,
    "precision_gate": PrecisionGateStage,
    "smoke": TrainStage,
    "smoke_gate": SmokeGateStage,
    "train": TrainStage,
    "figures": FiguresStage,
    "drift": DriftStage,
    "fault_check": FaultCheckStage,
    "collapse": CollapseStage,
}


def stage_json(settings: Settings, stage: str) -> str:
    """`STAGES[stage]` of `settings` as the one JSON string that Snakemake tracks and the stage's program reads."""
    return STAGES[stage].of(settings).to_json()
