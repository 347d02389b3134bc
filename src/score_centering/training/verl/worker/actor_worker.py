"""verl's actor worker, with what verl has no extension point for: gloo on a CPU, and checkpoints without pickle."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from score_centering.runs.files import make_folder, sync_file, sync_folder, writing
from score_centering.settings.inputs import sha256_file


class ActorWorker(ActorRolloutRefWorker):
    """One rank: its part of the model, and the adapter to its rollout server."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        if not torch.cuda.is_available() and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_policy_loss(self, loss: Any) -> None:
        self.actor.set_loss_fn(loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold(self) -> None:
        self.actor.engine.hold()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lend_held(self) -> None:
        self.actor.engine.lend_held()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_back(self) -> None:
        self.actor.engine.take_back()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_shard(self, folder: str, held: bool) -> str:
        """Write this rank's state durably into `folder`, `held`: with a stale sampler's weights; returns the file's
        sha256."""
        path = shard_path(Path(folder), self.rank)
        make_folder(path.parent)
        state = self.actor.engine.shard() | (self.actor.engine.held_shard() if held else {})
        with writing(path):
            save_file({name: value.cpu().contiguous() for name, value in state.items()}, path)
            sync_file(path)
            sync_folder(path.parent)
        return sha256_file(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_shard(self, folder: str) -> None:
        self.actor.engine.restore_shard(load_file(shard_path(Path(folder), self.rank)))


def shard_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"
