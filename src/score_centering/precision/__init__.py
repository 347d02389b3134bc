"""Number formats of rollouts and the requantising adapter; torch is imported only once one of them is wanted."""

from importlib import import_module
from typing import Any

_PLACES = {
    "listed_linears": "requantising",
    "requantise": "requantising",
    "int8_linear": "int8",
    "quantise_activation": "int8",
    "quantise_weight": "int8",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"score_centering.precision.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
