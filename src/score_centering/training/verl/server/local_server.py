"""The local engine (INT8 linears, INT4 KV cache) as a rollout server of verl, and the replica that launches it."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from transformers import AutoConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from score_centering.rollout import LocalEngine, Rollout
from score_centering.training.verl.messages import answer, sampling_of

GATHERING_SECONDS = 0.02  # requests that come within this of each other are decoded together


@dataclass(frozen=True)
class Waiting:
    prompt: tuple[int, ...]
    parameters: dict[str, Any]
    future: asyncio.Future


class LocalServer:
    """A Ray actor that holds one engine and batches what is waiting. A rollout does not depend on its batch."""

    def __init__(self, config: Any, model_folder: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        w8a8 = w8a8_config(config)
        self._engine = LocalEngine(
            AutoConfig.from_pretrained(model_folder),
            quantization=config.quantization,
            w8a8_config=w8a8,
            kv_cache=config.engine_kwargs["vllm"]["kv_cache_dtype"],
            max_batch=config.max_num_seqs,
            max_prompt_length=config.prompt_length,
            max_response_length=config.response_length,
            device=device,
        )
        self._queue: list[Waiting] = []
        self._decoding: asyncio.Task | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """One rollout; see `messages`."""
        future = asyncio.get_running_loop().create_future()
        self._queue.append(Waiting(tuple(prompt_ids), sampling_params, future))
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        rollout = await future
        return TokenOutput(token_ids=rollout.token_ids.tolist(), stop_reason="completed", extra_fields=answer(rollout))

    async def sync(self, weights: dict[str, Tensor], step: int) -> None:
        await asyncio.to_thread(self._engine.sync, weights, step)

    async def wake_up(self, **_: Any) -> None:
        """The engine keeps its memory."""

    async def sleep(self, **_: Any) -> None:
        """The engine keeps its memory."""

    async def _decode(self) -> None:
        while self._queue:
            arrived = 0
            while arrived < len(self._queue):
                arrived = len(self._queue)
                await asyncio.sleep(GATHERING_SECONDS)
            batch, self._queue = self._queue, []
            for group in _alike(batch):
                try:
                    rollouts = await asyncio.to_thread(self._generate, group)
                except Exception as error:  # handed to whoever waits; the actor itself lives on
                    for waiting in group:
                        waiting.future.set_exception(error)
                    continue
                for waiting, rollout in zip(group, rollouts, strict=True):
                    waiting.future.set_result(rollout)

    def _generate(self, group: Sequence[Waiting]) -> list[Rollout]:
        """Rollouts of requests that differ in prompt and seed only, in their order."""
        prompts = sorted({waiting.prompt for waiting in group})
        number = {prompt: i for i, prompt in enumerate(prompts)}
        order = sorted(range(len(group)), key=lambda k: number[group[k].prompt])
        owner = np.array([number[group[k].prompt] for k in order])
        stream = np.array([group[k].parameters["seed"] for k in order], dtype=np.uint64)
        parameters = group[0].parameters
        made = self._engine.generate_streams(
            prompts, owner, stream, sampling_of(parameters), parameters["top_logprobs"]
        )
        placed: list[Any] = [None] * len(group)
        for k, rollout in zip(order, made, strict=True):
            placed[k] = rollout
        return placed


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


def w8a8_config(config: Any) -> dict | None:
    if config.quantization is None:
        return None
    return json.loads(Path(config.quantization_config_file).read_text(encoding="utf-8"))


def _alike(batch: Sequence[Waiting]) -> list[list[Waiting]]:
    """`batch` in groups whose requests ask for the same but for prompt and seed."""
    groups: dict[str, list[Waiting]] = {}
    for waiting in batch:
        rest = {key: value for key, value in waiting.parameters.items() if key != "seed"}
        groups.setdefault(repr(sorted(rest.items())), []).append(waiting)
    return list(groups.values())
