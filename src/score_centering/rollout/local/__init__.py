"""The local engine: INT8 weights and INT4 KV cache stored and computed with for real."""

from score_centering.rollout.local.local_engine import LocalEngine

__all__ = ["LocalEngine"]
