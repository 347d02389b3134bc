"""Enters this project's classes into verl's registries; verl imports it in every worker (`model.external_lib`)."""

import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from score_centering.training.verl import agent_loop  # noqa: F401  enters itself
from score_centering.training.verl.worker import (
    fsdp_engine,
    packed_qwen3_5,  # noqa: F401  installs itself
)


def _local_replica() -> type[RolloutReplica]:
    from score_centering.training.verl.server.local_server import LocalReplica

    return LocalReplica


def _vllm_replica() -> type[RolloutReplica]:
    from score_centering.training.verl.server.vllm_server import VllmReplica

    return VllmReplica


def _register_rollouts() -> None:
    RolloutReplicaRegistry.register("local", _local_replica)
    RolloutReplicaRegistry.register("vllm", _vllm_replica)
    base._ROLLOUT_REGISTRY["local", "async"] = "score_centering.training.verl.worker.local_adapter.LocalAdapter"


def _cpu_memory_statistics() -> None:
    """verl reads device memory through `torch.<device>`; torch.cpu lacks these names, and nothing is counted there."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: 0)


fsdp_engine.register()
_register_rollouts()
_cpu_memory_statistics()
