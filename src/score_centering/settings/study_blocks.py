"""Settings of the studies beside the experiment, and of the artificial mismatch that they and a preset can ask for."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from score_centering.settings.block import Block, Name, NonNegative, NonNegativeFloat, Positive, PositiveFloat
from score_centering.settings.training_blocks import Optim, TrainerSettings


class CacheFault(Block):
    rate: Annotated[float, Field(gt=0, le=1)] = Field(description="share of the INT4 cache's entries that are damaged")
    kind: Literal["codes", "scale", "nan"] = Field(
        description="random codes, a scale times 2^-8 … 2^8, or a scale that is NaN"
    )
    transient: bool = Field(default=True, description="other entries in every call, as a race would; false: the same")


class Perturbation(Block):
    """An artificial mismatch: what is done to the rollout engine beside its number formats. The studies below make one
    of their own, which takes the place of a configured one."""

    weight_noise: NonNegativeFloat = Field(
        default=0.0, description="relative: each weight w of the engine's matrices becomes w·(1 + this·ε), ε fixed"
    )
    noisy_embedding: bool = Field(default=False, description="noise on the token embedding and the LM head too")
    cache_fault: CacheFault | None = None


class Drift(Block):
    steps: Positive = Field(description="updates of a run")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each variant")
    head_sizes: list[Positive] = Field(description="K of the centred variants beside the exact one, K = V")
    advantage: float = Field(default=1.0, description="the constant advantage of every rollout")
    optim: Optim
    train_batch_size: Positive = Field(description="prompts a step")
    n: Positive = Field(description="rollouts a prompt")
    check_every: Positive = Field(description="steps between measurements of the trainer's policy")
    check_prompts: Positive = Field(description="held-out prompts of a measurement, sampled once and greedily once")


class Faults(Block):
    kinds: list[Literal["codes", "scale", "nan"]] = Field(description="kinds of damage that the check is asked to see")
    rates: list[Annotated[float, Field(gt=0, le=1)]] = Field(description="shares of damaged cache entries")
    trained_kinds: list[Literal["codes", "scale"]] = Field(description="kinds that the arms are trained with")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="arms to train")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each arm")
    overrides: dict[str, Any] = Field(description="settings laid over every run")


class SweepPrecision(Block):
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings laid over the arm's")
    weight_noise: NonNegativeFloat = Field(default=0.0, description="relative noise on the engine's matrices")


class Sweep(Block):
    precisions: dict[Name, SweepPrecision] = Field(description="definitions; columns selects")
    columns: Annotated[list[str], Field(min_length=1)] = Field(description="precisions of the grid")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="rows of the grid")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _defined(self) -> "Sweep":
        for name in self.columns:
            if name not in self.precisions:
                raise ValueError(f"columns: unknown precision {name!r} (defined: {', '.join(sorted(self.precisions))})")
        return self


class StaleColumn(Block):
    sync_every: Positive = Field(description="trainer.sync_every of the column's runs")
    mini_batches: Positive = Field(default=1, description="actor_rollout_ref.actor.mini_batches of the column's runs")


class Stale(Block):
    columns: Annotated[list[StaleColumn], Field(min_length=1)] = Field(description="columns of the grid")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="rows of the grid")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _unique(self) -> "Stale":
        if len({repr(column) for column in self.columns}) != len(self.columns):
            raise ValueError("columns lists an entry twice")
        return self


class Bound(Block):
    lr: PositiveFloat = Field(description="learning rate at rate 1")
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings laid over every arm's")
    uncorrected: dict[str, Any] = Field(
        default_factory=dict, description="those laid over the first arm's alone, such as policy_loss ppo"
    )


class Conditions(Block):
    """One cell of the map."""

    precision: str = Field(description="one of the grid's precisions")
    rate: PositiveFloat = Field(description="one of the grid's rates")
    entropy: str = Field(description="one of the grid's entropies")
    bound: str = Field(description="one of the grid's bounds")


class CollapseGrid(Block):
    precisions: Annotated[list[str], Field(min_length=1)] = Field(description="precisions of the rollouts")
    rates: Annotated[list[PositiveFloat], Field(min_length=1)] = Field(description="multiples of the bounds' own rate")
    entropies: Annotated[list[str], Field(min_length=1)] = Field(description="models to start from")
    bounds: Annotated[list[str], Field(min_length=1)] = Field(description="what bounds a step")


class Collapse(Block):
    precisions: dict[Name, dict[str, Any]] = Field(
        description="definitions, the grid selects: settings laid over the arm's; perturbation is null unless they say"
    )
    entropies: dict[Name, dict[str, Any]] = Field(
        description="definitions: settings of the model stage and of its runs; {}: the experiment's own model"
    )
    bounds: dict[Name, Bound] = Field(description="definitions")
    grid: CollapseGrid
    control: str = Field(description="precision of the runs of the first arm that the others are held against")
    reference: Conditions = Field(description="the cell whose conditions the report takes away, one at a time")
    arms: Annotated[list[str], Field(min_length=2)] = Field(description="arms to train, the uncorrected one first")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _defined(self) -> "Collapse":
        for axis in ("precisions", "entropies", "bounds"):
            defined = getattr(self, axis)
            for name in getattr(self.grid, axis):
                if name not in defined:
                    raise ValueError(f"grid.{axis}: {name!r} is not defined (defined: {', '.join(sorted(defined))})")
        for key, values in (*self.grid, ("arms", self.arms), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{key} lists an entry twice: {values}")
        chosen = {"control": ("precisions", self.control)}
        chosen |= {f"reference.{key}": (f"{PLURALS[key]}", value) for key, value in self.reference}
        for key, (axis, value) in chosen.items():
            if value not in getattr(self.grid, axis):
                raise ValueError(f"{key}: {value!r} is not in grid.{axis} = {getattr(self.grid, axis)}")
        return self


PLURALS = {"precision": "precisions", "rate": "rates", "entropy": "entropies", "bound": "bounds"}
"""Axis of the map → the key of `CollapseGrid` that lists it."""


def check_perturbation(perturbation: Perturbation | None, trainer: TrainerSettings) -> None:
    """Raises ValueError where a run is to be perturbed by a trainer that doesn't drive the rollout engine itself."""
    if perturbation is not None and trainer.name != "local":
        raise ValueError(f"perturbation: needs trainer.name local, which drives the rollout engine, not {trainer.name}")
