"""Enters this project's classes into verl's registries; verl imports it in every worker (`model.external_lib`)."""

import torch

from score_centering.training.verl import engine, packed_qwen3_5  # noqa: F401  the import of the second installs it


def _cpu_memory_statistics() -> None:
    """verl reports device memory through `torch.<device>`; torch.cpu has no such counters."""
    for name in ("max_memory_allocated", "max_memory_reserved"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: 0)


engine.register()
_cpu_memory_statistics()
