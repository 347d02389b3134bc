"""The local engine's weight sync in verl's worker: requantises once, and hands those bytes to the worker's server."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout

from score_centering.precision import listed_linears, requantise
from score_centering.rollout.local.architecture import parameter_model
from score_centering.rollout.make_engine import read_quantised_config
from score_centering.training.verl.server.local_server import quantised_path, server_name


class LocalAdapter(BaseRollout):
    """Takes a worker's weights, requantises them once, and hands those bytes to the worker's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        quantised = read_quantised_config(self.config.quantization, quantised_path(self.config))
        model = parameter_model(self.model_config.hf_config)
        self._listed = {} if quantised is None else listed_linears(quantised, model)
        self._name = server_name(int(os.environ["RANK"]))

    async def resume(self, tags: list[str]) -> None:
        """The engine keeps its memory."""

    async def release(self) -> None:
        """The engine keeps its memory."""

    async def update_weights(
        self, weights: Iterator[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], global_steps: int = 0, **_: Any
    ) -> None:
        bf16 = {name: value.to(torch.bfloat16) for name, value in weights}
        checkpoint = {name: value.cpu() for name, value in requantise(bf16, self._listed).items()}
        await ray.get_actor(self._name).sync.remote(checkpoint, global_steps)
