"""The run loop over verl: its Ray workers hold model and optimiser, its rollout servers generate."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import ResourcePoolManager
from verl.single_controller.ray.base import RayResourcePool
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy
from verl.utils.config import validate_config

from score_centering.reward import Scorer
from score_centering.rollout import Rollout, Sampling, StreamEngine
from score_centering.rollout.engine import sample_indices
from score_centering.rollout.vllm import request_seed
from score_centering.runs import RunFolder
from score_centering.runs.checkpoint import paths
from score_centering.runs.torch_state import restore_rng_state, rng_state
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file
from score_centering.settings.stages import TrainStage
from score_centering.training.arm import arm_objective
from score_centering.training.loop import RunLoop
from score_centering.training.task import Inputs, Task
from score_centering.training.transport import open_transport
from score_centering.training.verl import plugin  # noqa: F401  enters our rollout servers into this process too
from score_centering.training.verl.driver.ray_session import ray_session
from score_centering.training.verl.driver.verl_config import verl_config
from score_centering.training.verl.driver.verl_update import VerlUpdater
from score_centering.training.verl.messages import RECORD, request
from score_centering.training.verl.worker.actor_worker import ActorWorker, shard_path
from score_centering.training.verl.worker.loss_head import PolicyLoss

POOL = "global_pool"


def train_with_verl(run: RunFolder, stage: TrainStage, arm: str, seed: int, inputs: Inputs) -> None:
    """As `training.local.train_locally`, through verl: in its own Ray, or on the cluster that RAY_ADDRESS names.

    Raises:
        UserError: settings or inputs that can't be used, a non-finite update where the configuration says stop.
    """
    torch.set_num_threads(stage.runtime.threads)
    torch.manual_seed(seed)
    # Workers may run in another folder, or on another node.
    quantised = inputs.quantised_config and inputs.quantised_config.resolve()
    config = verl_config(stage, arm, seed, inputs.model_folder.resolve(), quantised)
    with (
        Scorer(stage.runtime.reward_workers, stage.runtime.reward_timeout_seconds) as scorer,
        ray_session(stage, config),
    ):
        tokenizer = AutoTokenizer.from_pretrained(inputs.model_folder, local_files_only=True)
        model_config = AutoConfig.from_pretrained(inputs.model_folder, local_files_only=True)
        task = Task(stage, seed, inputs, tokenizer, model_config.get_text_config().vocab_size)
        trainer = VerlTrainer(stage, arm, config, tokenizer)
        with open_transport(stage, trainer.servers, task) as generate:
            RunLoop(run, stage, task, trainer, generate, scorer).go(arm, seed)


class VerlTrainer:
    """Each step's rollouts, update and weight sync are calls on verl's workers; see `loop.Trainer`."""

    def __init__(self, stage: TrainStage, arm: str, config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ray = RayTrainer.build(config, tokenizer)
        self._ray.init_workers()
        self._ray.actor_rollout_wg.set_policy_loss(
            PolicyLoss(arm_objective(stage, arm), stage.actor_rollout_ref.rollout.temperature)
        )
        self.updater = VerlUpdater(self._ray.actor_rollout_wg, stage)
        self.servers = RolloutServers(self._ray, stage.actor_rollout_ref.rollout.name)
        self._held_step: int | None = None  # that of a stale sampler's weights
        self._awake = False

    def update(self, rollouts: Sequence[Rollout], gains: Tensor, step: int) -> dict[str, Any]:
        """vLLM gives its memory back first, as `plan` counts; it wakes with the weights that it is handed then. The
        local engine keeps its own."""
        self._sleep()
        return self.updater.update(rollouts, gains, step)

    def sync(self, step: int) -> None:
        self._ray.checkpoint_manager.update_weights(step)
        self._awake = True

    def hold(self, step: int) -> None:
        self._ray.actor_rollout_wg.hold()
        self._held_step = step

    def sync_held(self) -> None:
        """Through the parameters, the only weights that verl hands over. A sleeping vLLM has lost its own."""
        if self._awake:
            self._sleep()
        self._ray.actor_rollout_wg.lend_held()
        self.sync(self._held_step)
        self._ray.actor_rollout_wg.take_back()

    def _sleep(self) -> None:
        self._ray.checkpoint_manager.sleep_replicas()
        self._awake = False

    def clean_engine(self, _step: int) -> None:
        """verl's servers hold the rollouts' precision alone."""

    def resume(self, run: RunFolder) -> int | None:
        found = run.resume()
        if found is None:
            return None
        step, tensors, scalars = found
        folder = _shards(run, step)
        if len(scalars["shards"]) != self._ray.world_size:
            raise UserError(
                f"{folder}: written by {len(scalars['shards'])} ranks, this run has {self._ray.world_size}; "
                "go on with as many GPUs as before"
            )
        for rank, digest in enumerate(scalars["shards"]):
            path = shard_path(folder, rank)
            if not path.is_file() or sha256_file(path) != digest:
                raise UserError(
                    f"{path}: missing or changed since it was written; remove {run.state}/checkpoints/"
                    f"step{step:06d} to go on from the checkpoint before"
                )
        self._ray.actor_rollout_wg.load_shard(str(folder))
        restore_rng_state(tensors, scalars)
        self._held_step = scalars.get("sampler_step")
        return step

    def save(self, run: RunFolder, step: int) -> None:
        """The ranks' shards first, then the checkpoint that names their digests: a kill in between leaves the last."""
        folder = _shards(run, step)
        tensors, scalars = rng_state()
        stale = self._held_step is not None and self._held_step != step
        if stale:
            scalars["sampler_step"] = self._held_step
        digests = self._ray.actor_rollout_wg.save_shard(str(folder), stale)
        run.save_checkpoint(step, tensors, scalars | {"shards": digests})
        kept = {path.name for path in paths(run.state / "checkpoints")}
        for path in folder.parent.iterdir():
            if path.name not in kept:
                shutil.rmtree(path)


class RolloutServers(StreamEngine):
    """verl's rollout servers, all of them, as one engine. name: of the engine inside them."""

    def __init__(self, trainer: "RayTrainer", name: str) -> None:
        self._ray = trainer
        self._seed_of = request_seed if name == "vllm" else int

    def generate_streams(
        self,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        stream: np.ndarray,
        sampling: Sampling,
        top_logprobs: int,
    ) -> list[Rollout]:
        requests = [request(sampling, self._seed_of(number), top_logprobs) for number in stream.tolist()]
        batch = DataProto.from_single_dict(
            {
                "dummy": torch.zeros(len(owner), 1, dtype=torch.uint8),
                "raw_prompt": _objects([[]] * len(owner)),
                "prompt_ids": _objects([prompts[i] for i in owner]),
                "prompt_index": owner,
                "sample_index": sample_indices(owner),
                "request": _objects(requests),
            },
            meta_info={"validate": sampling.greedy},
        )
        batch, padding = pad_dataproto_to_divisor(batch, self._ray.config.actor_rollout_ref.rollout.agent.num_workers)
        made = unpad_dataproto(self._ray.async_rollout_manager.generate_sequences(batch), padding)
        return list(made.non_tensor_batch[RECORD])


class RayTrainer(RayPPOTrainer):
    """verl's trainer for what it sets up: worker group, rollout servers, agent loops, weight sync.

    Its own loop, data loaders and checkpoints are not used: prompts of a step, resume and log are the run folder's.
    """

    @classmethod
    def build(cls, config: DictConfig, tokenizer: Any) -> "RayTrainer":
        validate_config(config, need_reference_policy(config), need_critic(config))
        per_node = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        kind = ResourcePoolManager if config.trainer.device == "cuda" else _CpuPools
        pools = kind(resource_pool_spec={POOL: per_node}, mapping={Role.ActorRollout: POOL}, max_colocate_count=1)
        return cls(config, tokenizer, {Role.ActorRollout: ray.remote(ActorWorker)}, pools)

    @property
    def world_size(self) -> int:
        return self.actor_rollout_wg.world_size

    def _create_dataloader(self, *_: Any) -> None:
        """Prompts come from the run loop."""


class _CpuPools(ResourcePoolManager):
    """Pools of processes without a GPU."""

    def create_resource_pool(self) -> None:
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes, use_gpu=False, max_colocate_count=1, name_prefix=name
            )


def _shards(run: RunFolder, step: int) -> Path:
    return run.state.resolve() / "shards" / f"step{step:06d}"


def _objects(values: Sequence[Any]) -> np.ndarray:
    """(N,) object: values that NumPy must not unpack."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
