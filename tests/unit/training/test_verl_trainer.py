"""What the trainer asks of verl's parts, and in which order."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (requirements/test.lock has it)", allow_module_level=True)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]  # verl's imports: warnings and seconds


def test_the_rollout_engines_sleep_before_the_update():
    from score_centering.training.verl.driver.verl_trainer import VerlTrainer

    calls = []
    trainer = object.__new__(VerlTrainer)
    trainer._ray = SimpleNamespace(checkpoint_manager=SimpleNamespace(sleep_replicas=lambda: calls.append("sleep")))
    trainer.updater = SimpleNamespace(update=lambda *_: calls.append("update"))
    trainer.update([], torch.zeros(0), 1)
    assert calls == ["sleep", "update"]


def test_a_stale_sampler_wakes_with_the_held_weights_and_the_trained_ones_come_back():
    """Engines sleep once before each hand-over, never twice."""
    from score_centering.training.verl.driver.verl_trainer import VerlTrainer

    calls = []
    manager = SimpleNamespace(
        sleep_replicas=lambda: calls.append("sleep"), update_weights=lambda step: calls.append(f"weights {step}")
    )
    workers = SimpleNamespace(
        **{name: lambda name=name: calls.append(name) for name in ("hold", "lend_held", "take_back")}
    )
    trainer = object.__new__(VerlTrainer)
    trainer._ray = SimpleNamespace(checkpoint_manager=manager, actor_rollout_wg=workers)
    trainer.updater = SimpleNamespace(update=lambda *_: calls.append("update"))
    trainer.sync(0)
    trainer.hold(0)
    trainer.update([], torch.zeros(0), 1)
    trainer.sync_held()
    trainer.update([], torch.zeros(0), 2)
    trainer.sync(2)  # a validation between two syncs
    trainer.sync_held()
    held = ["lend_held", "weights 0", "take_back"]
    assert calls == [
        "weights 0", "hold", "sleep", "update", *held, "sleep", "update", "weights 2", "sleep", *held,
    ]  # fmt: skip


def test_answers_come_in_the_order_of_the_requests_and_without_padding():
    """Three prompts, two samples each, over four agent loops: verl gets eight rows and gives them back in its order."""
    from score_centering.rollout import Sampling
    from score_centering.training.verl.agent_loop import RECORD
    from score_centering.training.verl.driver.verl_trainer import RolloutServers

    asked = []

    def generate_sequences(batch):
        rows = batch.non_tensor_batch
        asked.append(len(batch))
        told = [
            f"{rows['prompt_index'][i]}.{rows['sample_index'][i]} {rows['prompt_ids'][i]} {rows['request'][i]['seed']}"
            for i in range(len(batch))
        ]
        batch.non_tensor_batch[RECORD] = np.array(told, dtype=object)
        return batch

    agent = SimpleNamespace(num_workers=4)
    ray = SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(agent=agent))),
        async_rollout_manager=SimpleNamespace(generate_sequences=generate_sequences),
    )
    owner, stream = np.array([0, 0, 1, 1, 2, 2]), np.array([11, 12, 13, 14, 15, 16], np.uint64)
    found = RolloutServers(ray, "local").generate_streams(
        [(5,), (6, 7), (8,)], owner, stream, Sampling(1.0, 4, False, (9,)), 2
    )
    assert asked == [8]
    assert found == [
        "0.0 (5,) 11", "0.1 (5,) 12", "1.0 (6, 7) 13", "1.1 (6, 7) 14", "2.0 (8,) 15", "2.1 (8,) 16",
    ]  # fmt: skip


def test_the_warm_up_goes_on_where_the_checkpoint_was(monkeypatch):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from score_centering.training.drift_meter import DriftSum
    from score_centering.training.verl.worker.fsdp_engine import FsdpEngine

    monkeypatch.setattr(FSDPEngineWithLMHead, "optimizer_step", lambda self: self.optimizer.step())

    def engine():
        made = object.__new__(FsdpEngine)
        made.module = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(made.module.weight)
        made.optimizer = torch.optim.SGD(made.module.parameters(), lr=1.0, momentum=0.5)
        made.optimizer_config = SimpleNamespace(lr=1.0, lr_warmup_steps=4)
        made.drift = DriftSum(lambda sums: 0.0)
        return made

    def step(made) -> float:
        made.module.weight.grad = torch.ones_like(made.module.weight)
        made.optimizer_step()
        return made.lr_scheduler_step()

    first, second = engine(), engine()
    assert [step(first), step(first)] == [0.25, 0.5]
    second.restore_shard({name: value.clone() for name, value in first.shard().items()})
    assert [step(second) for _ in range(3)] == [0.75, 1.0, 1.0]
    # Momenta 1, 1.5, 1.75, 1.875 and 1.9375 at those rates.
    assert second.module.weight.tolist() == [[-6.125, -6.125]]


def test_held_weights_are_lent_and_the_trained_ones_come_back_bit_for_bit():
    from score_centering.training.verl.worker.fsdp_engine import FsdpEngine

    engine = object.__new__(FsdpEngine)
    engine.module = torch.nn.Linear(3, 1, bias=False)
    held, own = torch.tensor([[0.1, -2.7, 1e-3]]), torch.tensor([[0.3, 4.1, -1e-3]])
    engine.module.weight.data.copy_(held)
    engine.hold()
    engine.module.weight.data.copy_(own)
    engine.lend_held()
    assert torch.equal(engine.module.weight.bfloat16(), held.bfloat16())
    engine.take_back()
    assert torch.equal(engine.module.weight, own)
    assert torch.equal(engine.held_shard()["sampler.weight"], held.bfloat16())


def test_a_skipped_update_is_left_out_of_the_sums():
    from score_centering.training.verl.driver.verl_update import _totals

    # Three updates of two micro-batches each; the second was not finite. By hand: 1 + 2 + 16 + 32.
    sums = [{"loss": float(2**index)} for index in range(6)]
    assert _totals(sums, np.array([True, False, True]))["loss"].item() == 51.0
    assert _totals(sums, np.array([False, False, False])) is None
