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
