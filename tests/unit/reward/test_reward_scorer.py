"""Processes that hang or die take their own item with them and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from score_centering.reward import Scorer

HANG = r"9^{9^{9^{9}}}"  # against a gold answer with a variable, SymPy evaluates the tower
GOOD = [(r"\frac{x}{2}", r"\frac{1}{2}x"), (r"\sqrt{2}+1", r"1+\sqrt2"), ("(1,2)", "(1,2)"), (r"2\pi", r"2\pi")]
BAD = [("x", "y"), ("(2,1)", "(1,2)"), (r"3\pi", r"2\pi"), ("x+1", r"x+2")]


def score(scorer, pairs, truncated=None):
    responses = [rf"So \boxed{{{answer}}}" for answer, _ in pairs]
    none = [False] * len(pairs)
    return scorer.score(responses, [gold for _, gold in pairs], truncated or none, none)


@pytest.fixture(scope="module")
def scorer():
    with Scorer(workers=1, timeout_s=20.0) as running:
        yield running


def test_rewards_keep_the_order_of_the_responses(scorer):
    pairs = [*GOOD, *BAD, *reversed(GOOD), ("5", "5"), ("5", "6")]
    result = score(scorer, pairs)
    assert result.rewards.tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 4 + [1.0, 0.0]
    assert result.rewards.dtype == np.float32
    assert (result.errors, result.timeouts) == (0, 0)


def test_truncated_and_unboxed_responses_score_0_without_an_error(scorer):
    result = scorer.score([r"\boxed{5}", r"\boxed{5}", "5", ""], ["5"] * 4, [True, False, False, False], [False] * 4)
    assert result.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert (result.errors, result.timeouts) == (0, 0)


def test_an_unreadable_gold_is_counted_as_an_error_for_each_response_and_never_rewarded(scorer):
    result = score(scorer, [("5", ""), ("5", ""), ("??", "??"), ("x", "x")])
    assert result.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (result.errors, result.timeouts) == (3, 0)


def test_hostile_texts_score_0_at_once_and_harm_nobody(scorer):
    hostile = ["5\x00", "\x00", "(" * 900, "{" * 500 + "}" * 500, "\\frac{1}{" * 60, "-" * 3000, "\ud800", "$" * 500]
    result = score(scorer, [*((text, "x+1") for text in hostile), ("x+1", "1+x"), ("x" * 1_000_000, "x+1")])
    assert result.rewards.tolist() == [0.0] * len(hostile) + [1.0, 0.0]
    assert result.timeouts == 0


def test_a_memory_bomb_is_an_error_or_a_timeout_and_harms_nobody():
    bombs = [r"10^{10^{10}}+x", r"(10^{9})!+x"]
    with Scorer(workers=1, timeout_s=1.5) as scorer:
        result = score(scorer, [*((bomb, "x+1") for bomb in bombs), GOOD[0]])
    assert result.rewards.tolist() == [0.0, 0.0, 1.0]


def test_gold_answers_are_checked(scorer):
    assert scorer.are_golds(["5", "", r"\frac12", "x" * 20_000, r"\text{}", "(1,2)"]) == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]


def test_lengths_must_agree(scorer):
    with pytest.raises(ValueError, match="2 responses, 1 answers, 2 truncated and 3 thinking flags"):
        scorer.score(["a", "b"], ["5"], [False, False], [False] * 3)


def test_a_box_in_thinking_that_the_prompt_opened_scores_0(scorer):
    responses = [r"\boxed{5}", r"\boxed{5}", r"Hm. \boxed{6}</think>\boxed{5}", r"\boxed{5}</think>"]
    result = scorer.score(responses, ["5"] * 4, [False] * 4, [True, False, True, True])
    assert result.rewards.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("options", "message"), [({"workers": 0}, "workers: 0"), ({"timeout_s": 0}, "timeout_s: 0")])
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Scorer(**options)


def test_the_processes_are_fresh_interpreters_without_torch_started_once(scorer):
    score(scorer, GOOD)
    [worker] = scorer._workers
    pid = worker.process.pid
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert command[:4] == [sys.executable, "-P", "-m", "score_centering.reward.worker"]
    assert "torch" not in maps and "transformers" not in maps
    score(scorer, GOOD)
    assert [worker.process.pid for worker in scorer._workers] == [pid]


def test_plain_integers_start_no_process():
    with Scorer() as idle:
        assert score(idle, [("5", "5"), ("6", "5")]).rewards.tolist() == [1.0, 0.0]
        assert idle._workers == []


def test_results_do_not_depend_on_the_number_of_workers(scorer):
    pairs = (GOOD + BAD) * 4 + [(f"x+{index}", f"{index % 3}+x") for index in range(9)]
    with Scorer(workers=2, timeout_s=20.0) as two:
        many = score(two, pairs)
        assert len(two._workers) == 2
    one = score(scorer, pairs)
    assert many.rewards.tolist() == one.rewards.tolist()
    assert (many.errors, many.timeouts) == (one.errors, one.timeouts) == (0, 0)


def test_a_hung_item_scores_0_is_counted_and_its_process_is_replaced():
    with Scorer(workers=1, timeout_s=2.0) as scorer:
        result = score(scorer, [GOOD[0], (HANG, "x+1"), GOOD[1], (HANG, "x+1"), BAD[0], GOOD[2]])
        assert result.rewards.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
        assert (result.errors, result.timeouts) == (0, 2)


def test_a_process_that_stands_still_meets_the_wall_clock(monkeypatch):
    with Scorer(workers=1, timeout_s=10.0) as scorer:
        score(scorer, GOOD[:1])  # the first answer of a process takes its time on a busy machine
        pid = scorer._workers[0].process.pid
        monkeypatch.setattr("score_centering.reward.scorer.WALL_FACTOR", 0.2)
        os.kill(pid, signal.SIGSTOP)
        result = score(scorer, [GOOD[1]])
        assert (result.rewards.tolist(), result.errors, result.timeouts) == ([0.0], 0, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_crashed_process_is_replaced_in_the_middle_of_a_batch():
    with Scorer(workers=1, timeout_s=60.0) as scorer:
        assert score(scorer, GOOD[:1]).rewards.sum() == 1
        pid = scorer._workers[0].process.pid
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        result = score(scorer, [GOOD[0], (HANG, "x+1"), *GOOD[1:], BAD[0]])
        killer.join()
        assert result.rewards.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
        assert (result.errors, result.timeouts) == (1, 0)


def test_a_process_that_died_while_idle_costs_no_item():
    with Scorer(workers=1, timeout_s=60.0) as scorer:
        score(scorer, GOOD[:1])
        scorer._workers[0].process.kill()
        scorer._workers[0].process.wait()
        result = score(scorer, GOOD)
        assert (result.rewards.sum(), result.errors) == (4, 0)


def test_stop_signals_to_the_whole_job_cost_no_score():
    """Batch systems send them to every process; the trainer finishes its step, which needs the scores."""
    with Scorer(workers=1, timeout_s=60.0) as scorer:
        score(scorer, GOOD[:1])
        pid = scorer._workers[0].process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        result = score(scorer, GOOD)
        assert (result.rewards.sum(), result.errors) == (4, 0)
        assert scorer._workers[0].process.pid == pid
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_an_interrupt_leaves_no_process_that_would_answer_late(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with Scorer(workers=1, timeout_s=60.0) as scorer:
        score(scorer, GOOD[:1])
        process = scorer._workers[0].process
        monkeypatch.setattr(scorer, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score(scorer, [(HANG, "x+1")])
        assert process.poll() is not None
        assert scorer._workers == []


def test_closing_ends_the_processes():
    with Scorer(workers=1, timeout_s=60.0) as scorer:
        score(scorer, GOOD[:1])
        process = scorer._workers[0].process
    assert process.poll() is not None


def test_a_worker_ends_with_its_parent():
    program = (
        "import sys; from score_centering.reward import Scorer\n"
        "scorer = Scorer(); scorer.score([r'\\boxed{x}'], ['x'], [False], [False])\n"
        "print(scorer._workers[0].process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.05)
    pytest.fail(f"worker {pid} outlived its parent")
