"""The run loop with a scripted engine, scorer and trainer, against expectations worked out by hand: two epochs of three
problems, two prompts a step, two rollouts a prompt, so three steps.

Shuffles and seeds of run seed 5 are NumPy's own, written down: a run made with other ones is another run.
"""

import json
import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from score_centering.data import Problem
from score_centering.reward.scorer import ScoreResult
from score_centering.rollout import Rollout
from score_centering.runs import make_identity, open_run
from score_centering.runs.process import EXIT_RESUMABLE
from score_centering.runs.schema import read_metrics
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training.loop import RunLoop
from score_centering.training.task import Inputs, Task

ROOT = Path(__file__).parents[3]
CONFIG = [ROOT / "config/config.yaml", ROOT / "config/test.yaml"]
SEED = 5
EOS = 9
STOP, CUT = "stop", "length"
OVERRIDES = [
    "data.train_batch_size=2", "data.val_batch_size=2", "data.max_prompt_length=4", "data.max_response_length=4",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.temperature=0.75", "algorithm.normalise=mean",
    "trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=2", "trainer.val_before_train=true",
]  # fmt: skip


class Tokenizer:
    """A prompt is one token, the number of its letter, and C's opens the thinking; a response's tokens are written out,
    without the end."""

    eos_token_id = EOS
    added_tokens_decoder: ClassVar[dict] = {}

    def apply_chat_template(self, messages, **_):
        return messages[0]["content"]

    def encode(self, text, **_):
        return [ord(letter) - ord("A") + 10 for letter in text.split("\n")[0]]

    def decode(self, tokens, skip_special_tokens):
        if skip_special_tokens:
            return "".join(str(token) for token in tokens if token != EOS)
        return "C<think>" if tokens == [12] else "prompt"


def problem(name: str, answer: str) -> Problem:
    return Problem(name, answer, name, "test")


TRAIN = [problem("A", "1"), problem("B", "2"), problem("C", "3")]
VALIDATION = [problem("X", "7"), problem("Y", "8"), problem("Z", "never asked")]


@dataclass
class Script:
    """Everything that the loop asks for, in order; engine, scorer and trainer in one."""

    responses: list[list[tuple[list[int], str]]]  # of each call of an engine: tokens, why they end
    calls: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    scored: list = field(default_factory=list)
    gains: list = field(default_factory=list)
    resumes_after: int | None = None

    def generate(self, prompts, n, sampling, seed, top_logprobs):
        self.calls.append("validate" if sampling.greedy else "generate")
        self.asked.append((
            "".join(prompt.problem for prompt in prompts), n, sampling.greedy, sampling.temperature,
            sampling.max_tokens, sampling.stop_token_ids, seed, top_logprobs,
        ))  # fmt: skip
        return self._rollouts([prompt.ids for prompt in prompts], n, top_logprobs)

    def score(self, texts, answers, truncated, thinking):
        self.scored.append(list(zip(texts, answers, truncated, thinking, strict=True)))
        right = [float(text == answer and not cut) for text, answer, cut, _ in self.scored[-1]]
        return ScoreResult(np.array(right, np.float32), len(self.scored), 10 + len(self.scored))

    def resume(self, run):
        self.calls.append("resume")
        run.resume()
        return self.resumes_after

    def update(self, rollouts, gains, step):
        self.calls.append(f"update {step}")
        self.gains.append(gains.tolist())
        return {"loss": step / 4, "grad_norm": step / 8, "nonfinite_updates": 0}

    def sync(self, step):
        self.calls.append(f"sync {step}")

    def hold(self, step):
        self.calls.append(f"hold {step}")

    def sync_held(self):
        self.calls.append("sync held")

    def save(self, run, step):
        self.calls.append(f"save {step}")

    def clean_engine(self, step):
        self.calls.append(f"clean {step}")
        return SimpleNamespace(generate=self._clean)

    def _clean(self, ids, n, sampling, seed, top_logprobs):
        self.asked.append((ids, n, sampling.greedy, sampling.temperature, seed, top_logprobs))
        return self._rollouts(ids, n, top_logprobs)

    def _rollouts(self, ids, n, k):
        made = self.responses.pop(0)
        assert len(made) == len(ids) * n, "the script has another number of responses"
        return [rollout(i // n, i % n, ids[i // n], *made[i], k) for i in range(len(made))]


def rollout(prompt: int, sample: int, ids, tokens: list[int], finish: str, k: int) -> Rollout:
    half = np.float32(np.float16(math.log(0.5)))
    head = np.array([[token, (token + 1) % 50] for token in tokens], np.int32)
    masses = np.tile(np.array([half, np.float16(math.log(0.25))], np.float32), (len(tokens), 1))
    return Rollout(
        prompt, sample, np.array(ids, np.int32), np.array(tokens, np.int32), np.full(len(tokens), half, np.float32),
        head if k else None, masses if k else None, finish,
    )  # fmt: skip


def run_of(folder: Path, script: Script, *overrides: str):
    """The records of a run that `script` drives."""
    stage = TrainStage.of(load_settings(CONFIG, [*OVERRIDES, *overrides], "sc"))
    task = Task(stage, SEED, Inputs(TRAIN, VALIDATION, folder, None), Tokenizer(), 50)
    with open_run(folder / "run", make_identity("test", "sc", SEED, stage.identity(), "cpu", 1)) as run:
        RunLoop(run, stage, task, script, script.generate, script).go("sc", SEED)
        return run.records()


# The epochs' permutations are B, C, A and A, C, B, so the steps' prompts are B and C, then A twice, then C and B.
STEP_1 = [([2, EOS], STOP), ([4, EOS], STOP), ([3, EOS], STOP), ([3], CUT)]  # the last would be right, but it is cut
STEP_2 = [([1, EOS], STOP), ([1, EOS], STOP), ([1, EOS], STOP), ([2, 2, EOS], STOP)]
STEP_3 = [([2, EOS], STOP), ([3, EOS], STOP), ([3, EOS], STOP), ([2, 2], CUT)]  # first and third: the other's answer
ONE = [([7, EOS], STOP), ([7, EOS], STOP)]  # X right, Y wrong
BOTH = [([7, EOS], STOP), ([8, EOS], STOP)]
NONE = [([7], CUT), ([5, 5, 5, EOS], STOP)]  # X cut, Y wrong
WHOLE = [ONE, ONE, STEP_1, STEP_2, BOTH, NONE, STEP_3, NONE, BOTH]  # each validation: greedy, then clean


@pytest.fixture
def whole(tmp_path):
    """A whole run, and its records."""
    script = Script([*WHOLE])
    return script, run_of(tmp_path, script)


def test_each_step_asks_for_its_prompts_with_its_seed_and_validation_greedily(whole):
    script, _ = whole
    greedy = ("XY", 1, True, 0.75, 4, (EOS,), 16823399, 0)
    assert script.asked == [
        greedy, ([(33,), (34,)], 1, False, 1.0, 3598628658, 0),
        ("BC", 2, False, 0.75, 4, (EOS,), 3796490668, 2),
        ("AA", 2, False, 0.75, 4, (EOS,), 3226123765, 2),
        greedy, ([(33,), (34,)], 1, False, 1.0, 1070606992, 0),
        ("CB", 2, False, 0.75, 4, (EOS,), 727168946, 2),
        greedy, ([(33,), (34,)], 1, False, 1.0, 3373068814, 0),
    ]  # fmt: skip


def test_each_response_meets_the_answer_of_its_own_prompt(whole):
    """Text, answer, whether it was cut, whether it begins inside the thinking."""
    script, _ = whole
    no, yes = False, True
    one = [("7", "7", no, no), ("7", "8", no, no)]
    both, none = [("7", "7", no, no), ("8", "8", no, no)], [("7", "7", yes, no), ("555", "8", no, no)]
    assert script.scored == [
        one, one,
        [("2", "2", no, no), ("4", "2", no, no), ("3", "3", no, yes), ("3", "3", yes, yes)],
        [("1", "1", no, no), ("1", "1", no, no), ("1", "1", no, no), ("22", "1", no, no)],
        both, none,
        [("2", "3", no, yes), ("3", "3", no, yes), ("3", "2", no, no), ("22", "2", yes, no)],
        none, both,
    ]  # fmt: skip


def test_groups_are_the_rollouts_of_one_prompt(whole):
    """Also where one problem is asked twice: the second step's A of either epoch has a baseline of its own."""
    script, _ = whole
    assert script.gains == [[0.5, -0.5, 0.5, -0.5], [0.0, 0.0, 0.5, -0.5], [-0.5, 0.5, 0.0, 0.0]]


def test_the_order_of_update_sync_validation_and_checkpoint(whole):
    script, _ = whole
    assert script.calls == [
        "resume", "sync 0", "validate", "clean 0",
        "generate", "update 1", "sync 1",
        "generate", "update 2", "sync 2", "validate", "clean 2", "save 2",
        "generate", "update 3", "sync 3", "validate", "clean 3", "save 3",
    ]  # fmt: skip


def test_every_metric_of_every_row(whole):
    _, records = whole
    found = [{name: value for name, value in record["metrics"].items() if value is not None} for record in records]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert found[0] == {
        "val_reward_mean": 0.5, "val_response_length_mean": 2.0, "val_truncated_share": 0.0, "clean_reward_mean": 0.5,
    }  # fmt: skip
    assert found[1] == {
        "reward_mean": 0.5, "reward_std": pytest.approx(math.sqrt(1 / 3)), "response_length_mean": 1.75,
        "response_length_max": 2.0, "truncated_share": 0.25, "generated_tokens": 7, "sampler_age": 0, "loss": 0.25,
        "grad_norm": 0.125, "nonfinite_updates": 0, "zero_variance_group_share": 0.0, "scorer_errors": 3,
        "scorer_timeouts": 13,
    }  # fmt: skip
    assert found[2] == {
        "reward_mean": 0.75, "reward_std": pytest.approx(0.5), "response_length_mean": 2.25,
        "response_length_max": 3.0, "truncated_share": 0.0, "generated_tokens": 9, "sampler_age": 0, "loss": 0.5,
        "grad_norm": 0.25, "nonfinite_updates": 0, "zero_variance_group_share": 0.5, "scorer_errors": 4,
        "scorer_timeouts": 14, "val_reward_mean": 1.0, "val_response_length_mean": 2.0, "val_truncated_share": 0.0,
        "clean_reward_mean": 0.0,
    }  # fmt: skip
    assert found[3] == {
        "reward_mean": 0.25, "reward_std": pytest.approx(0.5), "response_length_mean": 2.0,
        "response_length_max": 2.0, "truncated_share": 0.25, "generated_tokens": 8, "sampler_age": 0, "loss": 0.75,
        "grad_norm": 0.375, "nonfinite_updates": 0, "zero_variance_group_share": 0.5, "scorer_errors": 7,
        "scorer_timeouts": 17, "val_reward_mean": 0.0, "val_response_length_mean": 2.5, "val_truncated_share": 0.5,
        "clean_reward_mean": 1.0,
    }  # fmt: skip


def test_what_is_published_is_what_was_recorded(whole, tmp_path):
    _, records = whole
    table = read_metrics(tmp_path / "run/metrics.parquet").to_pylist()
    assert table == [{"step": record["step"], **record["metrics"]} for record in records]
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["metrics"] == table


def test_times_are_of_their_own_step(whole):
    _, records = whole
    times = [record["timing"] for record in records]
    assert [time["validation_s"] is not None for time in times] == [True, False, True, True]
    assert [time["checkpoint_s"] is not None for time in times] == [False, False, False, True]  # of the step before
    for time, row in zip(times[1:], records[1:], strict=True):
        assert time["tokens_per_s"] == pytest.approx(row["metrics"]["generated_tokens"] / time["rollout_s"])
        assert time["step_s"] >= time["rollout_s"] + time["reward_s"] + time["update_s"] + time["sync_s"]


def test_a_stale_sampler_is_looked_past_and_gets_its_own_weights_back(tmp_path):
    script = Script([*WHOLE])
    records = run_of(tmp_path, script, "trainer.sync_every=2")
    assert script.calls == [
        "resume", "sync 0", "hold 0", "validate", "clean 0",
        "generate", "update 1", "sync held",
        "generate", "update 2", "sync 2", "validate", "clean 2", "hold 2", "save 2",
        "generate", "update 3", "sync 3", "validate", "clean 3", "sync held", "save 3",
    ]  # fmt: skip
    assert [record["metrics"]["sampler_age"] for record in records] == [None, 0, 1, 0]


@pytest.mark.parametrize("done, first", [(1, ["sync held"]), (2, ["sync 2", "hold 2"])])
def test_a_resumed_run_goes_on_with_the_weights_that_its_sampler_had(tmp_path, done, first):
    script = Script(WHOLE[3:] if done == 1 else WHOLE[6:], resumes_after=done)
    records = run_of(tmp_path, script, "trainer.sync_every=2")
    assert script.calls[: 2 + len(first)] == ["resume", *first, "generate"]
    assert [record["step"] for record in records] == list(range(done + 1, 4))
    assert script.asked[0][0] == {1: "AA", 2: "CB"}[done], "the data position comes with the step"


def test_a_stop_signal_ends_the_step_and_saves_it(tmp_path):
    script = Script([*WHOLE])

    def update(rollouts, gains, step):
        os.kill(os.getpid(), signal.SIGTERM)
        return Script.update(script, rollouts, gains, step)

    script.update = update
    with pytest.raises(SystemExit) as ended:
        run_of(tmp_path, script)
    assert ended.value.code == EXIT_RESUMABLE
    assert script.calls[-4:] == ["generate", "update 1", "sync 1", "save 1"]
    assert not (tmp_path / "run/metrics.parquet").exists()


def test_without_validation_nothing_is_validated_and_without_checkpoints_none_is_written(tmp_path):
    script = Script([STEP_1, STEP_2, STEP_3])
    run_of(tmp_path, script, "trainer.test_freq=-1", "trainer.save_freq=-1")
    steps = [call for step in (1, 2, 3) for call in ("generate", f"update {step}", f"sync {step}")]
    assert script.calls == ["resume", "sync 0", *steps]


def test_the_clean_reward_can_be_left_out(tmp_path):
    script = Script([ONE, STEP_1, STEP_2, BOTH, STEP_3, NONE])
    records = run_of(tmp_path, script, "trainer.clean_reward=false")
    assert not [call for call in script.calls if call.startswith("clean")]
    assert [record["metrics"]["clean_reward_mean"] for record in records] == [None] * 4
    script = Script([ONE, STEP_1, STEP_2, BOTH, STEP_3, NONE])
    script.clean_engine = lambda step: None  # as verl's
    records = run_of(tmp_path / "without", script)
    assert [record["metrics"]["clean_reward_mean"] for record in records] == [None] * 4


def test_a_reward_that_is_no_number_ends_the_run_in_one_line(tmp_path):
    script = Script([STEP_1])
    script.score = lambda texts, *_: ScoreResult(np.full(len(texts), np.nan, np.float32), 0, 0)
    with pytest.raises(UserError, match=r"step 1: .* the reward of rollout 0 \(group 0\) is nan.*checkpoint is kept"):
        run_of(tmp_path, script, "trainer.val_before_train=false", "trainer.test_freq=-1")


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path, capsys):
    stage = TrainStage.of(load_settings(CONFIG, [*OVERRIDES, "data.max_prompt_length=2"], "sc"))
    long = [problem("ABC", "6"), *TRAIN]
    task = Task(stage, SEED, Inputs(long, VALIDATION, tmp_path, None), Tokenizer(), 50)
    assert [prompt.problem for prompt in task.train] == ["A", "B", "C"]
    assert [prompt.ids for prompt in task.train] == [(10,), (11,), (12,)]
    assert capsys.readouterr().err == "dropped 1 of 4 training prompts: over 2 tokens\n"
    with pytest.raises(UserError, match=r"data\.max_prompt_length = 2: every training prompt is longer"):
        Task(stage, SEED, Inputs(long[:1], VALIDATION, tmp_path, None), Tokenizer(), 50)
