"""One rank of verl's FSDP engine: an update with each objective on a given batch, in a process of its own.

verl changes transformers, logging and torch.distributed for its whole process, so tests run it from outside.
`python verl_engine_program.py FOLDER RANK RANKS` reads FOLDER/{model,case.pt}, writes FOLDER/rank<RANK>.pt.
"""

import os
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="-", MASTER_PORT="0")
    store = torch.distributed.FileStore(str(folder / f"store{ranks}"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

    from score_centering.training.verl import update
    from score_centering.training.verl.loss import PolicyLoss

    case = torch.load(folder / "case.pt", weights_only=False)
    worker = make_worker(folder / "model")
    start = {name: value.clone() for name, value in worker.engine.shard().items()}
    results = {}
    for name, (objective, stage) in case["arms"].items():
        for layout in case["layouts"]:
            worker.engine.restore_shard(start)
            worker.set_loss_fn(PolicyLoss(objective, 1.0))
            updater = update.Updater(Workers(worker, rank, ranks, layout == "packed"), stage)
            before = {key: value.full_tensor().clone() for key, value in worker.engine.module.named_parameters()}
            metrics = updater.update(case["rollouts"], case["advantages"], step=1)
            after = {key: value.full_tensor() for key, value in worker.engine.module.named_parameters()}
            gradient = {key: before[key] - after[key] for key in before}  # SGD with a rate of 1
            results[name, layout] = gradient, metrics
    torch.save(results, folder / f"rank{rank}of{ranks}.pt")
    torch.distributed.destroy_process_group()


class Workers:
    """The worker group of a trainer, from one rank: it takes this rank's share of a batch, as Ray's dispatch does."""

    def __init__(self, worker, rank: int, ranks: int, packed: bool) -> None:
        self.worker, self.rank, self.world_size, self.packed = worker, rank, ranks, packed

    def update_actor(self, data):
        return self.worker.train_mini_batch(self._share(data))

    def compute_log_prob(self, data):
        return self.worker.infer_batch(self._share(data))

    def _share(self, data):
        from verl.utils import tensordict_utils

        data = tensordict_utils.chunk_tensordict(data, self.world_size)[self.rank]
        return tensordict_utils.assign_non_tensor(data, use_remove_padding=self.packed)


def make_worker(model: Path):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                load_tokenizer=False,
                external_lib="score_centering.training.verl.plugin",
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=FP32),
            optimizer_config=FSDPOptimizerConfig(optimizer="SGD", lr=1.0, weight_decay=0.0, clip_grad=1e9),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
