"""The local engine: quantised weights and KV cache, computed with for real."""

from score_centering.rollout.local.local_engine import LocalEngine

__all__ = ["LocalEngine"]
