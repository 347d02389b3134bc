"""Rollouts and updates on one GPU and on two of one host, in one run; on a CPU, on one thread and on two.

Each GPU has a process of its own, and two of them share the same prompts. Rollouts: the local engine, W8A8 with the
INT4 KV cache and K candidates a token, with the same number of slots on each GPU. Update: those rollouts through verl's
FSDP engine, arm `sc_tis`, with BF16 forwards, FP32 masters and AdamW, in the same micro-batches on each GPU. Their rows
are equally long and not packed: torch's stand-in for flash-linear-attention takes packed sequences one by one.
Needs verl (docs/full-scale.md).
"""

import hashlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from _common import parse_args, report
from engine import TINY, make_engine
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from loading import load
from score_centering.objectives import Objective
from score_centering.objectives.weights import Tis
from score_centering.rollout import Rollout, Sampling
from score_centering.rollout.streams import streams

ROLLOUT_GOAL, UPDATE_GOAL = 1.8, 1.5  # of two GPUs over one
SAME_LIMIT = 1e-3
SEED = 0
SC_TIS = Objective("sc_tis", True, Tis(2.0))
ADAMW = {"optimizer": "AdamW", "lr": 1e-6, "weight_decay": 0.0, "clip_grad": 1.0}
LARGE = Qwen3_5TextConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    layer_types=["linear_attention", "full_attention"] * 4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=False,
)
# batch: slots a GPU; prompt, response: tokens; prompts · n rollouts in all
SIZES = {
    ("cuda", False): dict(batch=64, prompt=64, response=256, prompts=64, n=4, micro=16, candidates=128, repeats=3),
    ("cuda", True): dict(batch=32, prompt=64, response=64, prompts=16, n=4, micro=16, candidates=128, repeats=2),
    ("cpu", False): dict(batch=8, prompt=32, response=48, prompts=16, n=4, micro=8, candidates=32, repeats=3),
    ("cpu", True): dict(batch=8, prompt=16, response=16, prompts=8, n=2, micro=4, candidates=32, repeats=2),
}


def ranks_program() -> ModuleType:
    """One rank of verl's engine as the tests run it."""
    return load("unit/training/verl_engine_program.py")


def measure(folder: Path, rank: int, ranks: int, device: str) -> None:
    """One rank: writes FOLDER/<RANKS>.json, if it is the first."""
    program = ranks_program()
    program.connect(folder / f"store{ranks}", rank, ranks, device)
    sizes = json.loads((folder / "sizes.json").read_text())
    rollout_s, rollouts = time_rollouts(folder / "model", sizes, rank, ranks, device)
    worker = program.make_worker(folder / "model", "bf16", ADAMW, checkpointing=device == "cuda")
    update_s, metrics = time_updates(worker, program.Workers(worker, rank, ranks, packed=False), rollouts, sizes)
    if rank == 0:
        digests = [hashlib.sha256(rollout.token_ids.tobytes()).hexdigest() for rollout in rollouts]
        found = {"rollout_s": rollout_s, "update_s": update_s, "digests": digests}
        found |= {name: metrics[name] for name in ("loss", "grad_norm")}
        (folder / f"{ranks}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def time_rollouts(
    model_folder: Path, sizes: dict[str, int], rank: int, ranks: int, device: str
) -> tuple[float, list[Rollout]]:
    """Seconds for everyone's rollouts, and all of them; a rollout depends on its prompt and stream, on no rank."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(device)
    engine = make_engine(model.config, model, True, sizes, device)
    del model
    shape = sizes["prompts"], sizes["prompt"]
    prompts = np.random.default_rng(SEED).integers(1, engine.architecture.vocab_size, shape)
    owner, sample = np.divmod(np.arange(sizes["prompts"] * sizes["n"]), sizes["n"])
    stream = streams(SEED, owner, sample)
    own = np.array_split(np.arange(sizes["prompts"]), ranks)[rank]
    mine = np.isin(owner, own)
    sampling = Sampling(temperature=1.0, max_tokens=sizes["response"], greedy=False, stop_token_ids=())
    made: list[Rollout] = []

    def generate() -> None:
        made[:] = engine.generate_streams(
            prompts[own].tolist(), owner[mine] - own[0], stream[mine], sampling, sizes["candidates"]
        )

    seconds = best_seconds(generate, sizes["repeats"], device)
    engine.close()
    parts: list = [None] * ranks
    torch.distributed.all_gather_object(parts, made)
    return seconds, [rollout for part in parts for rollout in part]


def time_updates(
    worker: object, workers: object, rollouts: Sequence[Rollout], sizes: dict[str, int]
) -> tuple[float, dict[str, float]]:
    """Seconds of an update with all rollouts, and the metrics of the first one."""
    from score_centering.training.verl.driver.verl_update import VerlUpdater
    from score_centering.training.verl.worker.loss_head import PolicyLoss

    actor = SimpleNamespace(mini_batches=1, ppo_epochs=1, ppo_micro_batch_size_per_gpu=sizes["micro"])
    stage = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=actor, rollout=SimpleNamespace(temperature=1.0)),
        trainer=SimpleNamespace(nonfinite="stop", drift_freq=-1),
    )
    worker.set_loss_fn(PolicyLoss(SC_TIS, temperature=1.0))
    updater = VerlUpdater(workers, stage)
    gains = torch.from_numpy(np.random.default_rng(SEED).choice([-1.0, 1.0], len(rollouts)).astype(np.float32))
    metrics: list[dict[str, float]] = []
    device = worker.device_name
    seconds = best_seconds(lambda: metrics.append(updater.update(rollouts, gains, 1)), sizes["repeats"], device)
    return seconds, metrics[0]


def best_seconds(run: Callable[[], None], repeats: int, device: str) -> float:
    """Of `run` on every rank, from their common start to the end of the last one; one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        wait_for_all(device)
        start = time.perf_counter()
        run()
        wait_for_all(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def wait_for_all(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def main() -> None:
    arguments = parse_args(__doc__)
    device = arguments.device
    if importlib.util.find_spec("verl") is None or (device == "cuda" and torch.cuda.device_count() < 2):
        sys.exit("error: scaling.py: needs verl (docs/full-scale.md), and two GPUs with --device cuda")
    sizes = SIZES[device, arguments.quick]
    config = LARGE if device == "cuda" else TINY
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(SEED)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
        (folder / "sizes.json").write_text(json.dumps(sizes))
        for ranks in (1, 2):
            ranks_program().run_ranks([__file__, "rank"], folder, ranks, device)
        one, two = (json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2))

    rollouts = sizes["prompts"] * sizes["n"]
    generated, trained = rollouts * sizes["response"], rollouts * (sizes["prompt"] + sizes["response"])
    unit = "GPU" if device == "cuda" else "thread"
    figures = {"rollouts": rollouts, "response tokens": sizes["response"]}
    for name, found in ((f"one {unit}", one), (f"two {unit}s", two)):
        figures |= {
            f"{name}: rollout seconds": found["rollout_s"],
            f"{name}: rollout tokens/s": generated / found["rollout_s"],
            f"{name}: update seconds": found["update_s"],
            f"{name}: update tokens/s": trained / found["update_s"],
        }
    ratios = {
        f"rollouts: speed of two {unit}s over one": (one["rollout_s"] / two["rollout_s"], ROLLOUT_GOAL, "at least"),
        f"update: speed of two {unit}s over one": (one["update_s"] / two["update_s"], UPDATE_GOAL, "at least"),
    }
    goals = {
        "rollouts with other tokens": (sum(a != b for a, b in zip(one["digests"], two["digests"], strict=True)), 0),
        "loss: relative difference": (relative(two["loss"], one["loss"]), SAME_LIMIT),
        "gradient norm: relative difference": (relative(two["grad_norm"], one["grad_norm"]), SAME_LIMIT),
    }
    # The goals of speed are stated for the full size on GPUs; elsewhere the same numbers are figures.
    if device == "cuda" and not arguments.quick:
        goals |= ratios
    else:
        figures |= {name: goal[0] for name, goal in ratios.items()}
    report("scaling", device, figures, goals)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        main()
