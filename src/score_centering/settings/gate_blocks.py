"""Settings of the gates: what is measured, and the limits."""

from typing import Any

from pydantic import Field, model_validator

from score_centering.settings.block import Block, Positive


class Limit(Block):
    min: float | None = Field(default=None, description="smallest allowed value")
    max: float | None = Field(default=None, description="largest allowed value")

    @model_validator(mode="after")
    def _some_bound(self) -> "Limit":
        if self.min is None and self.max is None:
            raise ValueError("a limit needs min, max or both")
        return self


class PrecisionSettings(Block):
    prompts: Positive = Field(description="held-out prompts")
    rollouts: Positive = Field(default=1, description="rollouts a prompt")
    head_sizes: list[Positive] = Field(default=[8, 32, 128], description="K at which head mass and drift are measured")
    drift_tokens: Positive = Field(default=64, description="positions at which the exact drift is measured")
    seed: int = Field(default=0, description="seed of the rollouts")
    limits: dict[str, Limit | None] = Field(
        description="measured number → limit of whatever model; null: not judged, whatever was measured on the model"
    )
    limits_of: dict[str, dict[str, Limit | None]] = Field(
        default={},
        exclude_if=lambda limits: not limits,
        description="the same of one model, by the name that precision/gate.json has for it",
    )


class Smoke(Block):
    overrides: dict[str, Any] = Field(description="settings of a smoke run, laid over every arm")
    limits: dict[str, Limit | None] = Field(
        description="measured number → limit of whatever model, for smoke/<arm>/gate.json; null: not judged"
    )
    limits_of: dict[str, dict[str, Limit | None]] = Field(
        default={},
        exclude_if=lambda limits: not limits,
        description="the same of one model, by the name that precision/gate.json has for it",
    )
