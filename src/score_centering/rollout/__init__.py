"""What a rollout is, what an engine is, and the engines."""

from score_centering.rollout import candidates
from score_centering.rollout.engine import Engine, Sampling
from score_centering.rollout.local import LocalEngine
from score_centering.rollout.record import Rollout, validate, validate_all

__all__ = ["Engine", "LocalEngine", "Rollout", "Sampling", "candidates", "validate", "validate_all"]
