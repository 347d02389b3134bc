import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from score_centering.runs.log import encode
from score_centering.runs.watch import changes, duration, experiment_status, line, table

PROGRAM = Path(__file__).parents[3] / "workflow" / "scripts" / "watch.py"


def begin(folder: Path, arm: str, steps: int, *, total: int = 60, owner: bool = True, published: bool = False) -> Path:
    """The state folder of a run that has recorded `steps` steps of 2 s each."""
    state = folder / "runs" / arm / "seed0" / "state"
    state.mkdir(parents=True)
    identity = {"arm": arm, "seed": 0, "config": {"trainer": {"total_training_steps": total}}}
    (state / "identity.json").write_text(json.dumps(identity))
    timing = {"step_s": 2.0, "tokens_per_s": 3000.0}
    records = [encode(step, {"reward_mean": 0.5, "k3_kl": 2e-3}, timing) for step in range(1, steps + 1)]
    (state / "steps.log").write_bytes(b"".join(records))
    (state / "lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) if owner else "")
    (state / "phase").write_text(f"7 {steps or '-'} rollout\n")
    if published:
        (state / "PUBLISHED").write_text("{}")
    return state


def test_where_runs_stand(tmp_path):
    begin(tmp_path, "sc", 10)
    begin(tmp_path, "grpo_bf16", 60, owner=False, published=True)
    begin(tmp_path, "grpo", 0)
    begin(tmp_path, "sc_tis", 5, owner=False)
    found = {status.arm: status for status in experiment_status(tmp_path, time.time())}
    assert list(found) == ["grpo", "grpo_bf16", "sc", "sc_tis"]
    assert [status.state for status in found.values()] == ["rollout", "finished", "rollout", "stopped"]
    assert (found["sc"].step, found["sc"].total, found["sc"].seconds_left) == (10, 60, 100.0)
    assert (found["sc"].reward, found["sc"].k3, found["sc"].tokens_per_s) == pytest.approx((0.5, 2e-3, 3000.0))
    assert found["grpo"].reward is None
    assert line(found["sc"]) == ("sc seed 0  rollout  step 10/60  reward 0.500  K3 2.0e-03  3000 tokens/s  1:40 left")
    assert line(found["grpo"]).endswith("step 0/60  reward –  K3 –  – tokens/s  – left")


def test_a_silent_run_is_killed_only_if_nobody_holds_its_lock(tmp_path):
    state = begin(tmp_path, "sc", 3)
    later = time.time() + 1000
    assert experiment_status(tmp_path, later)[0].state == "killed"
    with (state / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert experiment_status(tmp_path, later)[0].state == "rollout"


def test_a_torn_line_is_not_read(tmp_path):
    state = begin(tmp_path, "sc", 3)
    with (state / "steps.log").open("ab") as log:
        log.write(b'0000abcd {"step": 4')
    assert experiment_status(tmp_path, time.time())[0].step == 3


def test_only_news_is_told(tmp_path):
    begin(tmp_path, "sc", 3)
    begin(tmp_path, "grpo", 3)
    before = experiment_status(tmp_path, time.time())
    with (tmp_path / "runs" / "sc" / "seed0" / "state" / "steps.log").open("ab") as log:
        log.write(encode(4, {"reward_mean": 0.6}, {}))
    after = experiment_status(tmp_path, time.time())
    assert [status.arm for status in changes(before, after)] == ["sc"]
    assert changes(after, after) == [] and len(changes([], after)) == 2


def test_table_on_a_terminal(tmp_path):
    begin(tmp_path, "sc", 30)
    console = Console(width=110, force_terminal=False)
    with console.capture() as capture:
        console.print(table(experiment_status(tmp_path, time.time())))
    for text in ("sc", "30/60", "0.500", "2.0e-03", "3000", "1:00"):
        assert text in capture.get()


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3725, "1:02:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_program(tmp_path):
    begin(tmp_path, "sc", 2)
    start = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", start]
    finished = subprocess.run([*command, str(tmp_path), "--once"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("sc seed 0  rollout  step 2/60")
    missing = subprocess.run([*command, str(tmp_path / "x")], capture_output=True, text=True)
    assert missing.returncode == 2 and missing.stderr.startswith(f"error: {tmp_path}/x: no such folder")


def test_once_says_so_before_the_first_run(tmp_path):
    done = subprocess.run([sys.executable, str(PROGRAM), "--once", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: no run has begun\n")
