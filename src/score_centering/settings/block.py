"""What every block of the configuration is made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Frequency = Annotated[int, Field(gt=0)] | Literal[-1]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Block(BaseModel):
    """A strict, immutable block of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())


def require_chosen(block: Block, where: str) -> None:
    source = block.source  # type: ignore[attr-defined]
    if source in type(block).model_fields and getattr(block, source) is None:
        raise ValueError(f"source is {source!r} but the block {where}.{source} is missing")
