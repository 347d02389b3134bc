"""Training through agents, gateway and the engine's server: the same bytes as asking the engine itself."""

import json
from pathlib import Path

import pytest

from score_centering.data import Problem
from score_centering.gateway.agent import AgentError
from score_centering.model.scratch import build_model, train_tokenizer
from score_centering.runs import make_identity, open_run
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training import transport
from score_centering.training.local import train_locally
from score_centering.training.loop import Inputs
from score_centering.training.transport import ExternalGateway

ROOT = Path(__file__).parents[3]
CONFIG = [ROOT / "config/config.yaml", ROOT / "config/test.yaml"]
W8A8 = {
    "quantization_config": {
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    }
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    """A model with fresh weights at the size of config/test.yaml, and sums to solve."""
    folder = tmp_path_factory.mktemp("model")
    problems = [Problem(f"{a} + {b} =", str(a + b), f"{a}-{b}", "test") for a in range(6) for b in range(6)]
    settings = load_settings(CONFIG)
    texts = [f"{problem.prompt}\n{settings.prompt.instruction} {problem.answer}" for problem in problems]
    tokenizer = train_tokenizer(texts, settings.model.scratch.tokenizer.vocab_size)
    tokenizer.save_pretrained(folder)
    build_model(settings.model.scratch, tokenizer).bfloat16().save_pretrained(folder)
    (folder / "w8a8.json").write_text(json.dumps(W8A8))
    return Inputs(problems[:28], problems[28:], folder, folder / "w8a8.json")


def stage_of(arm: str, way: str) -> TrainStage:
    ways = [f"actor_rollout_ref.rollout.transport={way}"]
    overrides = [*ways, "trainer.total_training_steps=3", "data.max_prompt_length=64", "data.val_batch_size=4"]
    return TrainStage.of(load_settings(CONFIG, overrides, arm))


def metrics(folder: Path, inputs: Inputs, arm: str, way: str) -> bytes:
    stage = stage_of(arm, way)
    identity = make_identity("test", arm, 0, stage.identity(), "cpu", 1)
    with open_run(folder / way / arm, identity) as run:
        train_locally(run, stage, arm, 0, inputs)
    return (folder / way / arm / "metrics.parquet").read_bytes()


@pytest.mark.parametrize("arm", ["sc_tis", "grpo"])
def test_both_ways_train_to_the_same_bytes(tmp_path, inputs, arm):
    assert metrics(tmp_path, inputs, arm, "direct") == metrics(tmp_path, inputs, arm, "gateway")


def test_an_agent_of_another_configuration_is_noticed(tmp_path, inputs, monkeypatch):
    real = transport.work
    monkeypatch.setattr(transport, "work", lambda url, key, instruction: real(url, key, "Guess."))
    with pytest.raises(UserError, match=r"the agent's prompt of rollout \(prompt 0, sample 0\) is not the trainer's"):
        metrics(tmp_path, inputs, "sc", "gateway")


def test_agents_that_fail_end_the_run(tmp_path, inputs, monkeypatch):
    async def broken(*_) -> None:
        raise AgentError("out of ideas")

    monkeypatch.setattr(transport, "work", broken)
    with pytest.raises(UserError, match="out of ideas"):
        metrics(tmp_path, inputs, "sc", "gateway")


def test_a_gateway_is_refused_for_the_direct_way():
    external = ExternalGateway("http://127.0.0.1:1", 2)
    with (
        pytest.raises(UserError, match=r"^--gateway: needs actor_rollout_ref\.rollout\.transport=gateway$"),
        transport.open_transport(stage_of("sc", "direct"), None, None, 512, external),
    ):
        pass
