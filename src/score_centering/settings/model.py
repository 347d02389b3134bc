"""The typed configuration: every key a preset may hold, its meaning and its allowed values.

Names below `data`, `algorithm`, `actor_rollout_ref` and `trainer` are verl's; those below `score_centering` are the
published example's. `workflow/schemas/config.schema.json` is generated from these classes.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from score_centering.settings.block import Block, Name, NonNegative, Positive
from score_centering.settings.dataset_blocks import Dataset, PromptSettings
from score_centering.settings.dotted import deep_merge
from score_centering.settings.gate_blocks import PrecisionSettings, Smoke
from score_centering.settings.model_blocks import Model, Quantization
from score_centering.settings.study_blocks import (
    Collapse,
    Drift,
    Faults,
    Perturbation,
    Stale,
    Sweep,
    check_perturbation,
)
from score_centering.settings.training_blocks import (
    ActorRolloutRef,
    Algorithm,
    Data,
    Runtime,
    ScoreCentering,
    TrainerSettings,
)


class Arm(Block):
    description: str = Field(description="one line for tables and the report")
    label: str | None = Field(
        default=None, min_length=1, description="its name in figures and tables; null: a published arm's, or the key"
    )
    extends: str | None = Field(default=None, description="the arm whose overrides come first")
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings this arm lays over the others")


class RunSettings(Block):
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="arms to run, in the order of the tables")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each arm")
    control: str | None = Field(
        default=None, description="the arm whose rollouts lack nothing: figures and verdict hold the others against it"
    )

    @model_validator(mode="after")
    def _unique(self) -> "RunSettings":
        for key, values in (("arms", self.arms), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{key} lists an entry twice: {values}")
        return self


class Figures(Block):
    smoothing_steps: Positive = Field(default=5, description="trailing mean drawn over the raw reward curve")


class Settings(Block):
    """A whole configuration."""

    experiment: Name = Field(description="results go to results/<experiment>/")
    dataset: Dataset
    prompt: PromptSettings
    model: Model
    quantization: Quantization = Quantization()
    precision: PrecisionSettings
    smoke: Smoke
    score_centering: ScoreCentering = ScoreCentering()
    algorithm: Algorithm = Algorithm()
    data: Data
    actor_rollout_ref: ActorRolloutRef
    trainer: TrainerSettings
    runtime: Runtime = Runtime()
    perturbation: Perturbation | None = Field(default=None, description="an artificial mismatch; null: none")
    figures: Figures = Figures()
    arms: dict[Name, Arm] = Field(description="definitions; run.arms selects")
    run: RunSettings
    drift: Drift
    faults: Faults
    sweep: Sweep
    stale: Stale
    collapse: Collapse

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        for where in ("run", "faults", "sweep", "stale", "collapse"):
            for arm in getattr(self, where).arms:
                if arm not in self.arms:
                    raise ValueError(f"{where}.arms: unknown arm {arm!r} (defined: {', '.join(sorted(self.arms))})")
        for arm in self.arms:
            _lineage(self.arms, arm)
        if self.run.control is not None and self.run.control not in self.arms:
            defined = ", ".join(sorted(self.arms))
            raise ValueError(f"run.control: unknown arm {self.run.control!r} (defined: {defined})")
        scratch = self.model.scratch if self.model.source == "scratch" else None
        if scratch and self.score_centering.top_logprobs_num > scratch.tokenizer.vocab_size:
            raise ValueError(
                f"score_centering.top_logprobs_num = {self.score_centering.top_logprobs_num} exceeds the vocabulary "
                f"of {scratch.tokenizer.vocab_size} tokens (model.scratch.tokenizer.vocab_size)"
            )
        rollout = self.actor_rollout_ref.rollout
        replays = (self.trainer.name, rollout.name, rollout.transport) == ("local", "local", "direct")
        if rollout.enable_rollout_routing_replay and not replays:
            raise ValueError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay = true needs trainer.name local, "
                "actor_rollout_ref.rollout.name local and actor_rollout_ref.rollout.transport direct"
            )
        if rollout.exact:
            self._check_exact()
        check_perturbation(self.perturbation, self.trainer)
        rollouts = self.data.train_batch_size * rollout.n
        if rollouts % self.actor_rollout_ref.actor.mini_batches:
            raise ValueError(
                f"actor_rollout_ref.actor.mini_batches = {self.actor_rollout_ref.actor.mini_batches} does not divide "
                f"the {rollouts} rollouts of a step"
            )
        return self

    def _check_exact(self) -> None:
        """What would let an exact sampler differ from the update's forward."""
        actor, rollout = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout
        for key, value, wanted in (
            ("trainer.name", self.trainer.name, "local"),
            ("trainer.sync_every", self.trainer.sync_every, 1),
            ("perturbation", self.perturbation, None),
            ("actor_rollout_ref.actor.mini_batches", actor.mini_batches, 1),
            ("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, 1),
            ("actor_rollout_ref.rollout.name", rollout.name, "local"),
            ("actor_rollout_ref.rollout.transport", rollout.transport, "direct"),
            ("actor_rollout_ref.rollout.quantization", rollout.quantization, None),
            ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", rollout.precision.kv_cache_dtype, "auto"),
            (
                "actor_rollout_ref.rollout.enable_rollout_routing_replay",
                rollout.enable_rollout_routing_replay,
                False,
            ),
        ):
            if value != wanted:
                shown = "set" if key == "perturbation" else repr(value)
                raise ValueError(f"actor_rollout_ref.rollout.exact = true needs {key} = {wanted!r}, it is {shown}")

    def overrides_of(self, arm: str) -> dict[str, Any]:
        """What `arm` lays over the other settings: the overrides of the arm it extends, then its own."""
        merged: dict[str, Any] = {}
        for name in reversed(_lineage(self.arms, arm)):
            merged = deep_merge(merged, self.arms[name].overrides)
        return merged


def _lineage(arms: Mapping[str, Arm], arm: str) -> list[str]:
    """`arm`, the arm that it extends, and so on."""
    line = [arm]
    while (base := arms[line[-1]].extends) is not None:
        if base not in arms:
            raise ValueError(f"arms.{line[-1]}.extends: unknown arm {base!r} (defined: {', '.join(sorted(arms))})")
        if base in line:
            raise ValueError(f"arms.{arm}.extends: {' → '.join([*line, base])} is a circle")
        line.append(base)
    return line
