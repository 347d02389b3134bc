"""What a rollout is, what an engine is, and the engines; torch is imported only once an engine is wanted."""

from typing import TYPE_CHECKING, Any

from score_centering.rollout import candidates
from score_centering.rollout.engine import Engine, Sampling, StreamEngine
from score_centering.rollout.record import Rollout, mean_response_length, sampled_entropy, validate, validate_all

if TYPE_CHECKING:
    from score_centering.rollout.local import LocalEngine

__all__ = [
    "Engine",
    "LocalEngine",
    "Rollout",
    "Sampling",
    "StreamEngine",
    "candidates",
    "mean_response_length",
    "sampled_entropy",
    "validate",
    "validate_all",
]


def __getattr__(name: str) -> Any:
    if name == "LocalEngine":
        from score_centering.rollout.local import LocalEngine

        return LocalEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
