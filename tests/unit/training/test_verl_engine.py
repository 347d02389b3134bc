"""verl's FSDP engine with our loss against the local trainer: gradients, norms and metrics, on one rank and on two."""

import copy
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

from loading import load
from score_centering.objectives import build_objective
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.drift_meter import DriftMeter
from score_centering.training.masters import MasterWeights
from score_centering.training.update import Updater
from tiny_model import CONFIG, tiny_model, tiny_rollouts

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (requirements/test.lock has it)", allow_module_level=True)

pytestmark = pytest.mark.timeout(1800)  # each process imports verl first
PROGRAM = Path(__file__).with_name("verl_engine_program.py")
LAYOUTS = ("packed", "padded")
SEVERAL = "grpo, two mini-batches, two epochs"
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


class Tolerance(NamedTuple):
    """Of each gradient entry, relative and absolute, and of each metric, relative."""

    rtol: float
    atol: float
    metric: float


ROUNDING = Tolerance(rtol=1e-4, atol=2e-6, metric=2e-5)
CARRIED = Tolerance(rtol=2e-2, atol=1e-3, metric=1e-2)  # several updates of size 1 carry the first one's roundings on


def objective(arm: str):
    limits = dict(tis_max=2.0, mis_min=0.5, mis_max=5.0, clip_ratio_low=0.2, clip_ratio_high=0.3)
    return build_objective(arm, **ARMS[arm], **limits)


def run(folder: Path, ranks: int, device: str = "cpu") -> list[dict]:
    """Each rank's results."""
    load("unit/training/verl_engine_program.py").run_ranks([PROGRAM], folder, ranks, device)
    return [torch.load(folder / f"rank{rank}of{ranks}.pt") for rank in range(ranks)]


def stage(micro_batch_size: int, **actor: int) -> SimpleNamespace:
    """The settings that an update reads."""
    options = Actor(
        optim=Optim(name="sgd", lr=1.0), grad_clip=None, ppo_micro_batch_size_per_gpu=micro_batch_size, **actor
    )
    ref = SimpleNamespace(actor=options, rollout=SimpleNamespace(temperature=1.0))
    return SimpleNamespace(actor_rollout_ref=ref, trainer=SimpleNamespace(nonfinite="stop", drift_freq=1))


def cases(micro_batch_size: int) -> dict[str, tuple]:
    """Every arm with one update a step, and GRPO with four."""
    arms = {arm: (objective(arm), stage(micro_batch_size)) for arm in ARMS}
    return arms | {SEVERAL: (objective("grpo"), stage(micro_batch_size, mini_batches=2, ppo_epochs=2))}


def write_case(
    folder: Path, arms: dict[str, tuple], layouts: tuple[str, ...], param_dtype: str = "fp32", tied: bool = True
) -> None:
    """tied: one tensor for embedding and LM head."""
    config = copy.deepcopy(CONFIG)
    config.tie_word_embeddings = tied
    net = Qwen3_5ForCausalLM(config)
    net.load_state_dict(tiny_model().state_dict())
    net.save_pretrained(folder / "model")
    case = {
        "arms": arms,
        "layouts": layouts,
        "param_dtype": param_dtype,
        "rollouts": tiny_rollouts(len(ADVANTAGES)),
        "advantages": torch.tensor(ADVANTAGES),
    }
    torch.save(case, folder / "case.pt")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("one")
    write_case(folder, cases(micro_batch_size=4), LAYOUTS)
    return run(folder, 1)[0]


def local_update(arm: str) -> tuple[dict, dict]:
    """Gradient and metrics of the local trainer."""
    net = tiny_model()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    goal, settings = cases(64)[arm]
    actor = settings.actor_rollout_ref.actor
    meter = DriftMeter(dict(net.named_parameters()), goal, 1, 1.0)
    updater = Updater(net, MasterWeights(net, actor.optim), goal, actor, 1.0, "stop", meter)
    metrics = updater.update(tiny_rollouts(len(ADVANTAGES)), torch.tensor(ADVANTAGES), step=1)
    return {name: before[name] - value.detach() for name, value in net.named_parameters()}, metrics


def assert_same(found: tuple[dict, dict], expected: tuple[dict, dict], tolerance: Tolerance) -> None:
    gradients, metrics = zip(found, expected, strict=True)
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], value, rtol=tolerance.rtol, atol=tolerance.atol, msg=name)
    assert metrics[0].keys() == metrics[1].keys()
    for name, value in metrics[1].items():
        wanted = None if value is None else pytest.approx(value, rel=tolerance.metric, abs=1e-7)
        assert metrics[0][name] == wanted, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arm", [*ARMS, SEVERAL])
def test_update_is_the_local_trainers(one_rank, arm, layout):
    assert_same(one_rank[arm, layout], local_update(arm), CARRIED if arm == SEVERAL else ROUNDING)


def assert_ranks_make_the_update_of_one(ranks: list[dict], one: dict, tolerance: Tolerance) -> None:
    first, second = ranks
    for arm in ARMS:
        assert first[arm, "packed"][1] == second[arm, "packed"][1]
        assert_same(first[arm, "packed"], one[arm, "packed"], tolerance)


def test_two_ranks_make_the_update_of_one(one_rank, tmp_path):
    """In micro-batches of another size; only the order of FP32 sums differs."""
    write_case(tmp_path, {arm: case for arm, case in cases(micro_batch_size=2).items() if arm in ARMS}, ("packed",))
    assert_ranks_make_the_update_of_one(run(tmp_path, 2), one_rank, ROUNDING)
