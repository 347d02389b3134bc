"""verl's FSDP engine with our loss against the local trainer: gradients, norms and metrics, on one rank and on two."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

from score_centering.objectives import add_sums, build_objective, finalise_metrics
from score_centering.settings.model import Actor, Optim
from score_centering.training.masters import MasterWeights
from score_centering.training.update import Updater

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (requirements/test.lock has it)", allow_module_level=True)

PROGRAM = Path(__file__).with_name("verl_engine_program.py")
LAYOUTS = ("packed", "padded")
GRPO = dict(centering=False, loss_agg_mode="seq-mean-token-mean", policy_loss="ppo", is_mode="none")
WEIGHTED = dict(policy_loss="score_centering", loss_agg_mode="token-mean")
ARMS = {
    "grpo": GRPO,
    "sc": dict(centering=True, is_mode="none", **WEIGHTED),
    "sc_tis": dict(centering=True, is_mode="tis", **WEIGHTED),
    "sc_mis": dict(centering=True, is_mode="mis", **WEIGHTED),
    "grpo_mis": dict(centering=False, is_mode="mis", **WEIGHTED),
}
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 0.0, 2.0, -1.5, 0.25]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UPDATE = load("test_update")  # its model and rollouts


def objective(arm: str):
    limits = dict(tis_max=2.0, mis_min=0.5, mis_max=5.0, clip_ratio_low=0.2, clip_ratio_high=0.3)
    return build_objective(arm, **ARMS[arm], **limits)


def run(folder: Path, ranks: int) -> list[dict]:
    """Each rank's results."""
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, folder, str(rank), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}of{ranks}.pt") for rank in range(ranks)]


def write_case(folder: Path, layouts: tuple[str, ...], micro_batch_size: int) -> None:
    net = Qwen3_5ForCausalLM(UPDATE.CONFIG)
    net.load_state_dict(UPDATE.model().state_dict())
    net.save_pretrained(folder / "model")
    case = {
        "objectives": {arm: objective(arm) for arm in ARMS},
        "layouts": layouts,
        "rollouts": UPDATE.rollouts(len(ADVANTAGES)),
        "advantages": torch.tensor(ADVANTAGES),
        "micro_batch_size": micro_batch_size,
    }
    torch.save(case, folder / "case.pt")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("one")
    write_case(folder, LAYOUTS, micro_batch_size=4)
    return run(folder, 1)[0]


def local_update(arm: str) -> tuple[dict, dict]:
    """Gradient and metrics of the local trainer."""
    net = UPDATE.model()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    actor = Actor(optim=Optim(name="sgd", lr=1.0), grad_clip=1e9, ppo_micro_batch_size_per_gpu=64)
    updater = Updater(net, MasterWeights(net, actor.optim), objective(arm), actor, 1.0, "stop")
    metrics = updater.update(UPDATE.rollouts(len(ADVANTAGES)), torch.tensor(ADVANTAGES), step=1)
    return {name: before[name] - value.detach() for name, value in net.named_parameters()}, metrics


def metrics_of(result: dict) -> dict[str, float]:
    totals = None
    for part in result["sums"]:
        totals = add_sums(totals, {name: torch.tensor(value) for name, value in part.items()})
    return finalise_metrics(totals)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arm", ARMS)
def test_update_is_the_local_trainers(one_rank, arm, layout):
    result = one_rank[arm, layout]
    gradient, metrics = local_update(arm)
    assert gradient.keys() == result["gradient"].keys()
    for name, expected in gradient.items():
        torch.testing.assert_close(result["gradient"][name], expected, rtol=1e-4, atol=2e-6, msg=f"{arm}: {name}")
    assert result["grad_norm"] == [pytest.approx(metrics["grad_norm"], rel=1e-6)]
    assert result["lr"] == [metrics["learning_rate"]]
    found = metrics_of(result)
    assert found.keys() == metrics.keys() - {"grad_norm", "learning_rate", "nonfinite_updates"}
    for name, value in found.items():
        assert value == pytest.approx(metrics[name], rel=2e-5, abs=1e-7), name


def test_two_ranks_make_the_update_of_one(one_rank, tmp_path):
    """Each rank sees every other rollout, in micro-batches of another size; only the order of FP32 sums differs."""
    write_case(tmp_path, ("packed",), micro_batch_size=2)
    ranks = run(tmp_path, 2)
    for arm in ARMS:
        expected, (first, second) = one_rank[arm, "packed"], (rank[arm, "packed"] for rank in ranks)
        assert first["grad_norm"] == second["grad_norm"] == [pytest.approx(expected["grad_norm"][0], rel=1e-6)]
        assert first["sums"] == second["sums"]
        for name, value in metrics_of(expected).items():
            assert metrics_of(first)[name] == pytest.approx(value, rel=2e-5, abs=1e-7), (arm, name)
        for name, value in expected["gradient"].items():
            torch.testing.assert_close(first["gradient"][name], value, rtol=1e-4, atol=2e-6, msg=f"{arm}: {name}")
