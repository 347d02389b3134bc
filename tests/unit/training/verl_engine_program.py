"""One rank of verl's FSDP engine: an update with each objective on a given batch, in a process of its own.

verl changes transformers, logging and torch.distributed for its whole process, so tests run it from outside.
`python verl_engine_program.py FOLDER RANK RANKS DEVICE` reads FOLDER/{model,case.pt} and writes
FOLDER/rank<RANK>of<RANKS>.pt. On `cuda` each rank has the GPU of its own number.
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

SGD = {"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0, "clip_grad": float("inf")}


def main(folder: Path, rank: int, ranks: int, device: str) -> None:
    connect(folder / f"store{ranks}", rank, ranks, device)
    full_precision()

    from score_centering.training.verl.driver.verl_update import VerlUpdater
    from score_centering.training.verl.worker.loss_head import PolicyLoss

    case = torch.load(folder / "case.pt", weights_only=False)
    worker = make_worker(folder / "model", case["param_dtype"], SGD)
    start = {name: value.clone() for name, value in worker.engine.shard().items()}
    results = {}
    for name, (objective, stage) in case["arms"].items():
        for layout in case["layouts"]:
            worker.engine.restore_shard(start)
            worker.set_loss_fn(PolicyLoss(objective, 1.0))
            updater = VerlUpdater(Workers(worker, rank, ranks, layout == "packed"), stage)
            before = {key: value.full_tensor().clone() for key, value in worker.engine.module.named_parameters()}
            metrics = updater.update(case["rollouts"], case["advantages"], step=1)
            after = {key: value.full_tensor() for key, value in worker.engine.module.named_parameters()}
            gradient = {key: (before[key] - after[key]).cpu() for key in before}  # SGD with a rate of 1
            results[name, layout] = gradient, metrics
    torch.save(results, folder / f"rank{rank}of{ranks}.pt")
    torch.distributed.destroy_process_group()


def run_ranks(program: Sequence[str | Path], folder: Path, ranks: int, device: str) -> None:
    """Runs `program FOLDER RANK RANKS DEVICE` for every rank at the same time.

    Raises:
        RuntimeError: one failed; the others would wait for it and are killed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    logs = [folder / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, *program, folder, str(rank), str(ranks), device]
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(log.read_text() for log in logs))


def connect(store: Path, rank: int, ranks: int, device: str) -> None:
    """One of `ranks` processes that meet in the file `store`, with the backends that verl's own workers have."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="-", MASTER_PORT="0")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, timeout = ("cpu:gloo,cuda:nccl", timedelta(minutes=2)) if device == "cuda" else ("gloo", None)
    meeting = torch.distributed.FileStore(str(store), ranks)
    torch.distributed.init_process_group(backend, timeout=timeout, store=meeting, rank=rank, world_size=ranks)


def full_precision() -> None:
    """No TF32: torch's convolutions would use it on CUDA, and so do flash-linear-attention's kernels in FP32."""
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers takes torch's kernels then


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


def make_worker(model: Path, param_dtype: str, optimizer: dict[str, Any], checkpointing: bool = False):
    """verl's training worker with the model in the folder `model`.

    Args:
        param_dtype: "fp32" or "bf16", what the forward computes in; masters and sums of gradients are FP32.
        optimizer: fields of verl's FSDPOptimizerConfig.
        checkpointing: compute activations again in the backward pass.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    precision = {"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                load_tokenizer=False,
                external_lib="score_centering.training.verl.plugin",
                enable_gradient_checkpointing=checkpointing,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
            optimizer_config=FSDPOptimizerConfig(**optimizer),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
