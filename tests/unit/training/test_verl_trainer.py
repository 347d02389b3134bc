"""What the trainer asks of verl's parts, and in which order."""

import importlib.util
from types import SimpleNamespace

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
