"""The number formats of rollouts by name. Imports no torch: an object is loaded once its numbers are wanted.

To add a format: a file with a `Format` (linear layers) or a `CacheFormat` (KV caches), a line here, and a test.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from score_centering.precision.format import Format
    from score_centering.precision.kv_caches import CacheFormat


@dataclass(frozen=True)
class Entry:
    """One format.

    label: what figures and tables call it.
    place: module of this package and name of the object in it.
    folder: below `model/`, of the checkpoint that an experiment prepares; empty where none is needed.
    suffix: of a precision's name.
    min_capability: the oldest CUDA device that vLLM 0.25.0 has a kernel for, as 10 · major + minor.
    """

    label: str
    place: str
    folder: str = ""
    suffix: str = ""
    min_capability: int = 75


BF16 = "bf16"
UNQUANTISED = Entry("BF16", "bf16_format:FORMAT")
FORMATS = {
    "int8": Entry("INT8", "int8:FORMAT", "w8a8"),
    "fp8": Entry("FP8", "fp8:FORMAT", "fp8_dynamic", min_capability=89),
    "int4": Entry("INT4", "int4:GROUPS", "w4a16"),
    "int4_channel": Entry("INT4 per channel", "int4:CHANNELS", "w4a16_channel"),
    "nvfp4": Entry("NVFP4", "fp4:WEIGHTS", "nvfp4a16"),
    "mxfp8": Entry("MXFP8", "mxfp8:FORMAT", "mxfp8", min_capability=100),
}
"""Of linear layers, by `actor_rollout_ref.rollout.quantization`; null there is BF16."""

CACHES = {
    "auto": Entry("BF16 KV", "kv_caches:BF16"),
    "int4_per_token_head": Entry("INT4 KV", "kv_caches:INT4", suffix="int4kv"),
    "int8_per_token_head": Entry("INT8 KV", "kv_caches:INT8", suffix="int8kv"),
    "fp8": Entry("FP8 KV", "kv_caches:FP8", suffix="fp8kv"),
}
"""Of KV caches, by vLLM's `kv_cache_dtype`."""


@dataclass(frozen=True)
class Precision:
    """What rollouts are computed in: the format of the linear layers (None: BF16) and that of the KV cache."""

    quantization: str | None
    kv_cache_dtype: str

    @property
    def name(self) -> str:
        """`bf16`, `int8`, `int8_int4kv`: prefix of its measured numbers."""
        return "_".join(filter(None, (self.quantization or BF16, CACHES[self.kv_cache_dtype].suffix)))

    @property
    def label(self) -> str:
        """`BF16`, `INT8`, `INT8 + INT4 KV`."""
        cache = CACHES[self.kv_cache_dtype]
        return self._linears.label + (f" + {cache.label}" if cache.suffix else "")

    @property
    def _linears(self) -> Entry:
        return UNQUANTISED if self.quantization is None else FORMATS[self.quantization]


UNQUANTISED_PRECISION = Precision(None, "auto")


def precision_labels() -> dict[str, str]:
    """Name → label of every precision there is."""
    every = [Precision(quantization, cache) for quantization in (None, *FORMATS) for cache in CACHES]
    return {precision.name: precision.label for precision in every}


def format_of(name: str | None) -> "Format":
    """The format of linear layers by its name; None: BF16.

    Raises:
        ValueError: an unknown name.
    """
    if name is not None and name not in FORMATS:
        raise ValueError(f"number format {name!r}, allowed are {', '.join(FORMATS)}")
    return _load(UNQUANTISED if name is None else FORMATS[name])


def cache_format_of(name: str) -> "CacheFormat":
    """The cache format of one of `CACHES`."""
    return _load(CACHES[name])


def _load(entry: Entry) -> Any:
    module, attribute = entry.place.split(":")
    return getattr(import_module(f"score_centering.precision.{module}"), attribute)
