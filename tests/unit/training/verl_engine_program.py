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

    from verl.utils import tensordict_utils

    from score_centering.training.verl.batch import to_tensordict
    from score_centering.training.verl.loss import SUMS, PolicyLoss

    case = torch.load(folder / "case.pt", weights_only=False)
    worker = make_worker(folder / "model")
    start = {name: value.clone() for name, value in worker.engine.shard().items()}
    results = {}
    for name, objective in case["objectives"].items():
        for layout in case["layouts"]:
            worker.engine.restore_shard(start)
            worker.set_loss_fn(PolicyLoss(objective, 1.0))
            mine = slice(rank, None, ranks)  # every rank gets its share of the rollouts
            rows = len(case["rollouts"])
            data = to_tensordict(
                case["rollouts"][mine],
                case["advantages"][mine],
                mini_batch_size=rows,
                epochs=1,
                temperature=1.0,
                global_batch_size=rows,
                micro_batch_size_per_gpu=case["micro_batch_size"],
                use_dynamic_bsz=False,
                use_remove_padding=layout == "packed",
                dataloader_kwargs={"shuffle": False},
            )
            before = {key: value.full_tensor().clone() for key, value in worker.engine.module.named_parameters()}
            output = tensordict_utils.get(worker.train_mini_batch(data), "metrics")
            after = {key: value.full_tensor() for key, value in worker.engine.module.named_parameters()}
            results[name, layout] = {
                "gradient": {key: before[key] - after[key] for key in before},  # SGD with a rate of 1
                "grad_norm": output["grad_norm"],
                "lr": output["lr"],
                "sums": output[SUMS],
            }
    torch.save(results, folder / f"rank{rank}of{ranks}.pt")
    torch.distributed.destroy_process_group()


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
