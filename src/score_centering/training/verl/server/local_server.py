"""The local engine as a rollout server of verl, and the replica that launches it."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import AutoConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from score_centering.precision.registry import Precision
from score_centering.rollout.batching import Batcher, Request
from score_centering.rollout.make_engine import EngineOptions, make_engine
from score_centering.training.verl.messages import RECORD


class LocalServer:
    """A Ray actor that holds one engine; a thread of its own computes what waits."""

    def __init__(self, config: Any, model_folder: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        options = EngineOptions(
            "local",
            Precision(config.quantization, config.engine_kwargs["vllm"]["kv_cache_dtype"]),
            device,
            max_batch=config.max_num_seqs,
            max_prompt_length=config.prompt_length,
            max_response_length=config.response_length,
        )
        model_config = AutoConfig.from_pretrained(model_folder)
        self._engine = make_engine(options, model_config, quantised_config=quantised_path(config))
        self._batcher = Batcher(self._engine, max_waiting=sys.maxsize)  # the driver asks for a whole step at once
        threading.Thread(target=self._serve, daemon=True).start()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """One rollout; see `messages`."""
        asked = sampling_params
        request = Request(tuple(prompt_ids), asked["sampling"], asked["seed"], asked["top_logprobs"])
        self._batcher.submit(request)
        rollout = await asyncio.wrap_future(request.result)
        return TokenOutput(
            token_ids=rollout.token_ids.tolist(), stop_reason="completed", extra_fields={RECORD: rollout}
        )

    async def sync(self, weights: dict[str, Tensor], step: int) -> None:
        await asyncio.to_thread(self._engine.sync, weights, step)

    async def wake_up(self, **_: Any) -> None:
        """The engine keeps its memory."""

    async def sleep(self, **_: Any) -> None:
        """The engine keeps its memory."""

    def _serve(self) -> None:
        while True:
            try:
                self._batcher.serve_until(Future())
            except Exception:  # told to whoever waits; the actor itself lives on
                continue


class LocalReplica(RolloutReplica):
    """One server beside one worker, on the worker's device."""

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        node, devices = await worker.__ray_call__.remote(
            lambda _: (ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        )
        environment = {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        server = (
            ray.remote(LocalServer)
            .options(
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": environment},
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(
                self.config,
                self.model_config.path,
                "cuda" if devices else "cpu",
                int(os.environ.get("OMP_NUM_THREADS", "1")),
            )
        )
        await server.wake_up.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(self.replica_rank)


def server_name(rank: int) -> str:
    return f"local_server_{rank}"


def quantised_path(config: Any) -> Path | None:
    """The quantised model's config.json that verl's rollout configuration names."""
    return None if config.quantization is None else Path(config.quantization_config_file)
