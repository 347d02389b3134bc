"""Training through agents, gateway and the engine's server: the same bytes as asking the engine itself."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from score_centering.gateway.agent import AgentError
from score_centering.reward import Scorer, ScoreResult
from score_centering.runs import make_identity, open_run
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training import transport
from score_centering.training.local import train_locally
from score_centering.training.task import Inputs
from score_centering.training.transport import ExternalGateway

ROOT = Path(__file__).parents[3]
CONFIG = [ROOT / "config/config.yaml", ROOT / "config/test.yaml"]


def stage_of(arm: str, way: str) -> TrainStage:
    ways = [f"actor_rollout_ref.rollout.transport={way}"]
    overrides = [*ways, "trainer.total_training_steps=3", "data.max_prompt_length=64", "data.val_batch_size=4"]
    return TrainStage.of(load_settings(CONFIG, overrides, arm))


def metrics(folder: Path, small_inputs: Inputs, arm: str, way: str) -> bytes:
    stage = stage_of(arm, way)
    identity = make_identity("test", arm, 0, stage.identity(), "cpu", 1)
    with open_run(folder / way / arm, identity) as run:
        train_locally(run, stage, arm, 0, small_inputs)
    return (folder / way / arm / "metrics.parquet").read_bytes()


@pytest.mark.parametrize("arm", ["sc_tis", "grpo"])
def test_both_ways_train_to_the_same_bytes(tmp_path, small_inputs, arm, capfd, caplog):
    assert metrics(tmp_path, small_inputs, arm, "direct") == metrics(tmp_path, small_inputs, arm, "gateway")
    assert "Traceback" not in capfd.readouterr().err, "an agent outlived the servers that it asked"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_an_agent_of_another_configuration_is_noticed(tmp_path, small_inputs, monkeypatch):
    real = transport.work
    monkeypatch.setattr(transport, "work", lambda url, key, instruction: real(url, key, "Guess."))
    with pytest.raises(UserError, match=r"the agent's prompt of rollout \(prompt 0, sample 0\) is not the trainer's"):
        metrics(tmp_path, small_inputs, "sc", "gateway")


def test_agents_that_fail_end_the_run(tmp_path, small_inputs, monkeypatch):
    async def broken(*_) -> None:
        raise AgentError("out of ideas")

    monkeypatch.setattr(transport, "work", broken)
    with pytest.raises(UserError, match="out of ideas"):
        metrics(tmp_path, small_inputs, "sc", "gateway")


def test_a_gateway_is_refused_for_the_direct_way():
    external = ExternalGateway("http://127.0.0.1:1", 2)
    with (
        pytest.raises(UserError, match=r"^--gateway: needs actor_rollout_ref\.rollout\.transport=gateway$"),
        transport.open_transport(stage_of("sc", "direct"), None, None, external),
    ):
        pass


@pytest.mark.parametrize("way", ["direct", "gateway"])
@pytest.mark.parametrize("opening", ["<think>\n", ""], ids=["thinking", "answering"])
def test_the_scorer_hears_whether_the_prompt_opened_the_thinking(tmp_path, small_inputs, monkeypatch, way, opening):
    folder = shutil.copytree(small_inputs.model_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    tokenizer.save_pretrained(folder)
    heard = []

    def score(_self, responses, answers, truncated, thinking):
        heard.extend(thinking)
        return ScoreResult(np.arange(len(responses), dtype=np.float32) % 2, 0, 0)

    monkeypatch.setattr(Scorer, "score", score)
    metrics(tmp_path, replace(small_inputs, model_folder=folder), "grpo", way)
    assert heard and set(heard) == {opening != ""}
