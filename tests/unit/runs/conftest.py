"""A small training loop on the real run folder."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from score_centering import runs
from score_centering.runs.torch_state import optimizer_tensors, restore_optimizer, restore_rng_state, rng_state


def make_identity(**changes: Any) -> dict[str, Any]:
    values = {"experiment": "tiny", "arm": "sc", "seed": 0, "config": {"trainer": {"lr": 0.1}}, "device": "cpu"}
    return runs.make_identity(**{"trainer_revision": 1, **values, **changes})


def train_toy(
    run_dir: Path,
    steps: int = 5,
    save_freq: int = 2,
    on_step: Callable[[int, runs.RunFolder], None] = lambda step, run: None,
    afresh: bool = False,
    **identity: Any,
) -> int:
    """Train 8 weights with every kind of random number; returns the step it resumed after."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    order = np.random.permutation(64).tolist()
    with runs.open_run(run_dir, make_identity(**identity), afresh=afresh) as run:
        start = 0
        if (found := run.resume()) is not None:
            start, tensors, scalars = found
            with torch.no_grad():
                weights.copy_(tensors["weights"])
            restore_optimizer(optimizer, tensors)
            scheduler.load_state_dict(scalars["scheduler"])
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
            order = scalars["order"]
            restore_rng_state(tensors, scalars["rng"])
        for step in range(start + 1, steps + 1):
            started_at = datetime.now(UTC)
            run.phase("rollout")
            target = torch.randn(8) * random.random() + float(np.random.rand()) + order.pop() / 64
            run.phase("update")
            loss = ((weights - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            on_step(step, run)
            metrics = {"loss": loss.item(), "learning_rate": scheduler.get_last_lr()[0], "generated_tokens": step}
            run.record_step(step, metrics, {"step_s": 0.25, "started_at": started_at})
            if step % save_freq == 0 or step == steps or run.stop_requested:
                generators, rng = rng_state()
                scalars = {"scheduler": scheduler.state_dict(), "rng": rng, "order": order}
                tensors = {"weights": weights.detach(), **generators, **optimizer_tensors(optimizer)}
                run.save_checkpoint(step, tensors, scalars)
            if run.stop_requested:
                run.stop(step)
        run.publish("trainer:\n  lr: 0.1\n", {"steps": steps})
    return start


# Their first uses import half of torch and all of pandas: here, not in every fork.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
pa.array([0])


@pytest.fixture
def identity() -> Callable[..., dict[str, Any]]:
    return make_identity


@pytest.fixture
def train() -> Callable[..., int]:
    return train_toy


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, fork: Callable[[Callable[[], Any]], Any]) -> bytes:
    """metrics.parquet of the toy run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert fork(lambda: train_toy(folder)).code == 0
    return (folder / "metrics.parquet").read_bytes()
