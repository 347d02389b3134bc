"""Number formats of the rollout engine (INT8 linears, INT4 KV cache) and the requantising adapter."""

from score_centering.precision.int8 import int8_linear, quantise_activation, quantise_weight
from score_centering.precision.requantise import listed_linears, requantise

__all__ = ["int8_linear", "listed_linears", "quantise_activation", "quantise_weight", "requantise"]
