"""The drift meter against hand-worked gradients, against the arms' own updates, and across a resume."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from score_centering.objectives import Objective, TokenBatch, policy_loss_from_logits
from score_centering.objectives.weights import Tis
from score_centering.runs import make_identity, open_run
from score_centering.runs.schema import read_metrics
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import DriftStage, TrainStage
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.arm import arm_objective
from score_centering.training.drift_meter import COLUMNS, DriftMeter, DriftSum, due, total_norm
from score_centering.training.local import train_locally
from score_centering.training.masters import MasterWeights
from score_centering.training.task import Inputs
from score_centering.training.update import Updater
from tiny_model import tiny_model, tiny_rollouts

CONFIG = Path(__file__).parents[3] / "config/config.yaml"
PPO = Objective("grpo", False, clip_low=0.2, clip_high=0.3, reduction="seq-mean-token-mean")
ARMS = {
    "pg": Objective("pg", False),
    "sc": Objective("sc", True),
    "grpo": PPO,
    "sc_rollout_mean": Objective("sc", True, reduction="seq-mean-token-mean"),
    "grpo_tis": Objective("grpo_tis", False, Tis(2.0)),
    "sc_tis": Objective("sc_tis", True, Tis(2.0)),
}
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])


@pytest.mark.parametrize(
    ("arm", "wanted"),
    [
        # H = {0, 1}, Q_H = 0.9, P_H = 0.8, ρ = 0.1/0.2; c = q − ρp = (0.4, 0.1); dg/dz = c − (Σc)·p
        (Objective("pg", False), (0.2, -0.1, -0.1)),
        (PPO, (0.2, -0.1, -0.1)),
        # f = min(r, 1.2): m = (0.4, 0.36), α = min(1, 1.2ρ) = 0.6; c = m − α·p = (0.16, 0.12)
        (Objective("tis", False, Tis(1.2)), (0.048, 0.008, -0.056)),
    ],
)
def test_one_token_of_three_with_a_head_of_two_by_hand(arm, wanted):
    p = torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64)
    logits = p.log().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(
        target_ids=torch.tensor([2]),
        sampler_logprobs=torch.log(0.1 * one),
        advantages=3 * one,
        loss_weights=one / 6,
        mask=torch.tensor([True]),
        candidate_ids=torch.tensor([[0, 1]]),
        candidate_logprobs=torch.tensor([[0.6, 0.3]], dtype=torch.float64).log(),
    )
    policy_loss_from_logits(logits, batch, arm.drift()).loss.backward()
    assert logits.grad[0].tolist() == pytest.approx([value / 2 for value in wanted], abs=1e-15)


def test_equal_distributions_have_no_drift():
    logits = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = logits.detach().log_softmax(1).topk(4, 1)
    ones = torch.ones(5, dtype=torch.float64)
    batch = TokenBatch(head.indices[:, 0], head.values[:, 0], ones, ones, ones > 0, head.indices, head.values)
    policy_loss_from_logits(logits, batch, ARMS["pg"].drift()).loss.backward()
    assert float(logits.grad.abs().max()) < 1e-15


def update(arm: str, freq: int = 1, micro: int = 64, **actor):
    """Metrics of one step, and what it subtracted from each weight: SGD at a rate of 1, so the gradient."""
    net = tiny_model()
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    options = Actor(optim=Optim(name="sgd", lr=1.0), grad_clip=None, ppo_micro_batch_size_per_gpu=micro, **actor)
    meter = DriftMeter(dict(net.named_parameters()), ARMS[arm], freq, 1.0)
    updater = Updater(net, MasterWeights(net, options.optim), ARMS[arm], options, 1.0, "stop", meter)
    metrics = updater.update(tiny_rollouts(), ADVANTAGES, step=1)
    return metrics, {name: before[name] - value.detach() for name, value in net.named_parameters()}


@pytest.mark.parametrize(("uncentred", "centred"), [("pg", "sc"), ("grpo", "sc_rollout_mean"), ("grpo_tis", "sc_tis")])
def test_the_drift_is_what_centering_takes_out_of_the_update(uncentred, centred):
    """For each weight and reduction, with and without centering."""
    measured, plain = update(uncentred)
    also_measured, without_drift = update(centred)
    gradient = {name: without_drift[name] - plain[name] for name in plain}
    norm = total_norm(gradient.values())
    assert norm > 1e-3
    assert measured["drift_norm"] == pytest.approx(norm, rel=1e-4)
    assert also_measured["drift_norm"] == pytest.approx(norm, rel=1e-4)
    assert measured["drift_share"] == pytest.approx(norm / total_norm(plain.values()), rel=1e-4)
    assert measured["drift_coherence"] == pytest.approx(1)


@pytest.mark.parametrize("arm", ["pg", "sc_tis"])
def test_the_meter_changes_no_bit_of_the_update(arm):
    measured, gradient = update(arm)
    unmeasured, same = update(arm, freq=-1)
    assert not set(COLUMNS) & unmeasured.keys()
    assert {name: value for name, value in measured.items() if name not in COLUMNS} == unmeasured
    assert all(torch.equal(gradient[name], same[name]) for name in gradient)


@pytest.mark.parametrize("micro", [4, 1])
def test_the_drift_does_not_depend_on_the_split(micro):
    whole, parts = update("pg")[0], update("pg", micro=micro)[0]
    for name in COLUMNS:
        assert parts[name] == pytest.approx(whole[name], rel=1e-4), name


def test_of_several_updates_the_first_is_measured():
    """Two mini-batches: its rows, its loss weights, the weights before it."""
    net = tiny_model()
    options = Actor(optim=Optim(name="sgd", lr=1.0), grad_clip=None, ppo_micro_batch_size_per_gpu=64)
    meter = DriftMeter(dict(net.named_parameters()), ARMS["grpo"], 1, 1.0)
    half = Updater(net, MasterWeights(net, options.optim), ARMS["grpo"], options, 1.0, "stop", meter)
    first = half.update(tiny_rollouts()[:3], ADVANTAGES[:3], step=1)
    several = update("grpo", mini_batches=2)[0]
    for name in COLUMNS:
        assert several[name] == pytest.approx(first[name], rel=1e-5), name


def test_coherence_by_hand():
    def coherences(*gradients):
        total = DriftSum(total_norm)
        return [total.add({"w": torch.tensor(g)}, 10.0)["drift_coherence"] for g in gradients]

    assert coherences([3.0, 4.0], [6.0, 8.0]) == [1, 1]
    assert coherences([1.0, 0.0], [0.0, 1.0]) == [1, pytest.approx(math.sqrt(0.5))]
    assert coherences([1.0, 0.0], [-1.0, 0.0])[1] == 0
    noise = torch.randn(100, 10_000, generator=torch.Generator().manual_seed(0)).tolist()
    assert coherences(*noise)[-1] == pytest.approx(1 / math.sqrt(100), rel=0.05)


def test_ratios_to_nothing_are_null_and_what_is_not_finite_is_left_out():
    total = DriftSum(total_norm)
    assert total.add({"w": torch.zeros(2)}, 0.0) == {"drift_norm": 0, "drift_share": None, "drift_coherence": None}
    assert total.add({"w": torch.tensor([math.nan, 1.0])}, 1.0) == dict.fromkeys(COLUMNS)
    found = total.add({"w": torch.tensor([3.0, 4.0])}, math.inf)
    assert found == {"drift_norm": 5, "drift_share": None, "drift_coherence": 1}


def test_a_restored_sum_goes_on_bit_for_bit():
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    whole, first, second = (DriftSum(total_norm) for _ in range(3))
    wanted = [whole.add({"w": row}, 1.0) for row in rows]
    for row in rows[:4]:
        first.add({"w": row}, 1.0)
    second.restore({name: value.clone() for name, value in first.tensors().items()} | {"master.w": rows[0]})
    assert [second.add({"w": row}, 1.0) for row in rows[4:]] == wanted[4:]
    assert DriftSum(total_norm).tensors() == {}


def test_steps_that_are_due():
    assert [step for step in range(1, 22) if due(step, 10)] == [1, 11, 21]
    assert not any(due(step, -1) for step in range(1, 22))


def test_an_arm_that_records_no_head_is_refused():
    stage = TrainStage.of(load_settings([CONFIG], ["trainer.drift_freq=10"], "grpo"))
    with pytest.raises(UserError, match=r"^objective grpo: trainer\.drift_freq = 10 .* score_centering\.enabled"):
        arm_objective(stage, "grpo")
    recorded = load_settings([CONFIG], ["trainer.drift_freq=10", "score_centering.enabled=true"], "grpo")
    assert not arm_objective(TrainStage.of(recorded), "grpo").centering


def test_the_drift_study_measures_its_drift_itself():
    settings = load_settings([CONFIG], ["trainer.drift_freq=10"])
    assert DriftStage.of(settings).train.trainer.drift_freq == -1


def test_a_drift_has_no_score_of_its_own():
    assert ARMS["sc"].drift() == replace(ARMS["sc"], name="sc's drift", score=False)


def trained(folder: Path, inputs: Inputs, overrides: list[str], arm: str = "grpo") -> bytes:
    """metrics.parquet of a run in `folder`, from its last checkpoint on."""
    size = ["trainer.total_training_steps=5", "data.max_prompt_length=64", "data.val_batch_size=4"]
    settings = load_settings([CONFIG, CONFIG.with_name("test.yaml")], [*size, *overrides], arm)
    stage = TrainStage.of(settings)
    with open_run(folder, make_identity("test", arm, 0, stage.identity(), "cpu", 1)) as run:
        train_locally(run, stage, arm, 0, inputs)
    return (folder / "metrics.parquet").read_bytes()


def test_an_uncorrected_arm_measures_its_drift_and_resumes_to_the_same_bytes(tmp_path, small_inputs, monkeypatch):
    """Killed after the checkpoint of step 2, between the measurements of steps 1, 3 and 5."""
    meter = ["trainer.drift_freq=2", "trainer.save_freq=2", "score_centering.enabled=true"]
    undisturbed = trained(tmp_path / "undisturbed", small_inputs, meter)
    update = Updater.update

    def killed(self, rollouts, advantages, step):
        if step == 4:
            raise KeyboardInterrupt
        return update(self, rollouts, advantages, step)

    monkeypatch.setattr(Updater, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "resumed", small_inputs, meter)
    monkeypatch.setattr(Updater, "update", update)
    assert trained(tmp_path / "resumed", small_inputs, meter) == undisturbed
    table = read_metrics(tmp_path / "resumed/metrics.parquet").to_pydict()
    measured = [norm is not None for norm in table["drift_norm"]]
    assert measured == [step in (1, 3, 5) for step in table["step"]]
