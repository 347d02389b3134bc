"""verl's whole loop on Ray, on the CPU, with the local engine as rollout server: against the local trainer, killed and
resumed, and what it leaves behind. `make test-verl`, and `make test-verl-short` for those marked so.
"""

import hashlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from score_centering.runs.checkpoint import paths
from score_centering.runs.log import read_log

pytestmark = [pytest.mark.verl, pytest.mark.timeout(9000)]
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (requirements/test.lock has it)", allow_module_level=True)

PROGRAM = Path(__file__).with_name("verl_loop_program.py")
MARK = "VERL_LOOP_TEST"
# Of the rollouts themselves: the engines, seeds and prompts are the same, so these are equal to the last bit.
EXACT = {
    "reward_mean", "reward_std", "response_length_mean", "response_length_max", "truncated_share", "generated_tokens",
    "zero_variance_group_share", "scorer_errors", "scorer_timeouts", "advantage_abs_mean", "head_mass_sampler",
    "learning_rate", "nonfinite_updates", "k3_clamped_tokens", "val_reward_mean", "val_response_length_mean",
    "val_truncated_share",
}  # fmt: skip
# Of a BF16 forward over packed rows against padded ones: other products, so other roundings.
RELATIVE, ABSOLUTE = 0.05, 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    assert finish(start(folder, "save", "-", "-"))[0] == 0
    return folder


@pytest.fixture(autouse=True)
def leave_nothing_running(folder):
    yield
    for pid in alive(folder):
        os.kill(pid, signal.SIGKILL)


def start(
    folder: Path, trainer: str, arm: str, run: str, *overrides: str, device: str = "cpu"
) -> subprocess.Popen[str]:
    environment = {**os.environ, MARK: str(folder / run), "SC_LOG_DIR": f"{folder / run}.logs", "OMP_NUM_THREADS": "1"}
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # where no file has one, runs at the same time all write it
    return subprocess.Popen(
        [sys.executable, PROGRAM, trainer, arm, folder / "model", folder / run, f"runtime.device={device}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float | None = None) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def alive(folder: Path) -> list[int]:
    """Processes of the run in `folder`, or of all runs in it, and what they have started: all inherit the mark."""
    mark, found = f"\0{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                variables = b"\0" + (entry / "environ").read_bytes()
                if (mark + b"\0" in variables or mark + b"/" in variables) and _state(entry) != "Z":
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str] | None, seconds: float = 2400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gone(folder: Path) -> bool:
    return not alive(folder)


def steps(run: Path) -> list[dict]:
    path = run / "state/steps.log"
    return read_log(path) if path.exists() else []


def kill_once(condition: Callable[[], object], process: subprocess.Popen[str], folder: Path) -> None:
    """SIGKILL as soon as the condition holds; then nothing of the run is left."""
    wait_until(condition, process)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    wait_until(lambda: gone(folder), None, seconds=300)


@pytest.fixture(scope="module")
def undisturbed(folder) -> Path:
    """`sc` through verl, seven steps at one go."""
    code, output = finish(start(folder, "verl", "sc", "undisturbed", "trainer.total_training_steps=7"))
    assert code == 0, output
    wait_until(lambda: gone(folder), None, seconds=300)
    return folder / "undisturbed"


def first_steps(run: Path) -> list[dict]:
    """The initial validation and the first step: after that, weights differ by roundings and so do the rollouts."""
    return [record["metrics"] for record in steps(run)[:2]]


def assert_parity(through_verl: Path, locally: Path) -> None:
    pairs = list(zip(first_steps(through_verl), first_steps(locally), strict=True))
    assert len(pairs) == 2
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if value is None or name in EXACT:
                assert ours[name] == value, name
            else:
                assert ours[name] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE), name
    assert pairs[1][0]["grad_norm"] > 0.1, "the step taught nothing"


def notes(run: Path, kind: str) -> dict[int, list]:
    """What `verl_loop_program` wrote down, by step: `rollouts` or `servers`."""
    lines = Path(f"{run}.notes").read_text(encoding="utf-8").splitlines()
    return {note["step"]: note[kind] for note in map(json.loads, lines) if kind in note}


def assert_two_servers_sample_what_one_does(two: Path, one: Path) -> None:
    """Same weights, same seeds: same tokens and log-probs. And every hand-over gives both the same weights."""
    assert notes(two, "rollouts")[1] == notes(one, "rollouts")[1]
    servers = notes(two, "servers")
    assert len(servers) >= 3
    assert servers[0][0]["weights"] == notes(one, "servers")[0][0]["weights"]
    for first, second in servers.values():
        assert first["weights"] == second["weights"]
    assert len({first["weights"] for first, _ in servers.values()}) == len(servers), "a step left the weights alone"
    assert all(server["has_generated"] for server in servers[1])


@pytest.mark.short
def test_grpo_has_the_metrics_of_the_local_trainer(folder):
    code, output = finish(start(folder, "verl", "grpo", "grpo"))
    assert code == 0, output
    assert len(steps(folder / "grpo")) == 4
    code, output = finish(start(folder, "local", "grpo", "grpo_local"))
    assert code == 0, output
    assert_parity(folder / "grpo", folder / "grpo_local")


@pytest.mark.short
def test_sc_killed_and_resumed_has_the_metrics_of_the_local_trainer(folder):
    run, seven = folder / "killed", "trainer.total_training_steps=7"
    kill_once(lambda: paths(run / "state/checkpoints"), start(folder, "verl", "sc", run.name, seven), folder)
    saved = int(paths(run / "state/checkpoints")[0].name.removeprefix("step"))
    assert 1 <= saved < 7, "nothing was left to resume"
    before = steps(run)[: saved + 1]
    code, output = finish(start(folder, "verl", "sc", run.name, seven))
    assert code == 0, output
    assert [record["step"] for record in steps(run)] == list(range(8))
    assert steps(run)[: len(before)] == before, "a step was made again: its seconds differ"
    products = {path.name for path in run.iterdir()}
    assert products == {"metrics.parquet", "timing.parquet", "config.yaml", "run.json", "state"}
    code, output = finish(start(folder, "local", "sc", "sc_local", seven))
    assert code == 0, output
    assert_parity(run, folder / "sc_local")


def test_two_ranks_with_two_servers_make_the_run_of_one(folder, undisturbed):
    code, output = finish(start(folder, "verl", "sc", "two", "trainer.n_gpus_per_node=2"))
    assert code == 0, output
    assert_parity(folder / "two", undisturbed)
    assert_two_servers_sample_what_one_does(folder / "two", undisturbed)


def test_through_the_gateway_a_run_is_the_same_to_the_last_bit(folder, undisturbed):
    run, overrides = folder / "gateway", ("trainer.total_training_steps=4", "trainer.save_freq=-1")
    way = "actor_rollout_ref.rollout.transport=gateway"
    code, output = finish(start(folder, "verl", "sc", run.name, way, *overrides))
    assert code == 0, output
    for kind, first in (("rollouts", 1), ("servers", 0)):
        assert notes(run, kind) == {step: notes(undisturbed, kind)[step] for step in range(first, 5)}
    through, straight = ([record["metrics"] for record in steps(path)[:5]] for path in (run, undisturbed))
    assert len(through) == 5 and through == straight


def test_killed_stopped_and_crashed_runs_leave_nothing_and_go_on(folder, undisturbed):
    run = folder / "disturbed"

    def begin() -> subprocess.Popen[str]:
        return start(folder, "verl", "sc", "disturbed", "trainer.total_training_steps=7")

    kill_once(lambda: len(steps(run)) >= 2, begin(), folder)

    process = begin()
    wait_until(lambda: len(steps(run)) >= 3, process)
    worker = next(pid for pid in alive(folder) if "WorkerDict" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(worker, signal.SIGKILL)
    code, output = finish(process)
    assert code == 2, output
    assert "error: a process of Ray failed: " in output
    assert "Traceback" not in output
    wait_until(lambda: gone(folder), None, seconds=300)

    process = begin()
    wait_until(lambda: len(steps(run)) >= 4, process)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the trainer and its children all get it
    code, output = finish(process)
    assert code == 75, output
    assert "SIGINT: stopped after step" in output
    wait_until(lambda: gone(folder), None, seconds=300)

    process = begin()
    wait_until(lambda: len(steps(run)) >= 6, process)
    os.kill(process.pid, signal.SIGTERM)
    code, output = finish(process)
    if code == 75:  # else the last step was on its way already
        assert "SIGTERM: stopped after step" in output
        code, output = finish(begin())
    assert code == 0, output
    wait_until(lambda: gone(folder), None, seconds=300)
    for name in ("metrics.parquet", "config.yaml"):
        first, second = (hashlib.sha256((path / name).read_bytes()).digest() for path in (run, undisturbed))
        assert first == second, name
    info = [json.loads((path / "run.json").read_text())["metrics"] for path in (run, undisturbed)]
    assert info[0] == info[1]


def test_a_stale_sampler_survives_a_kill_between_two_syncs(folder):
    """Servers get the weights of steps 0, 3 and 6, and those of a validation; each time the same bytes."""
    stale = ("trainer.sync_every=3", "trainer.total_training_steps=5")
    code, output = finish(start(folder, "verl", "sc", "stale", *stale))
    assert code == 0, output
    run = folder / "stale_killed"

    def between() -> bool:
        found = paths(run / "state/checkpoints")
        return bool(found) and int(found[0].name.removeprefix("step")) % 3 != 0

    kill_once(between, start(folder, "verl", "sc", run.name, *stale), folder)
    assert 1 <= len(steps(run)) - 1 < 5, "nothing was left to resume"
    code, output = finish(start(folder, "verl", "sc", run.name, *stale))
    assert code == 0, output
    killed, whole = ([record["metrics"] for record in steps(path)] for path in (run, folder / "stale"))
    assert killed == whole
    assert [row["sampler_age"] for row in whole] == [None, 0, 1, 2, 0, 1]
    handed: dict[int, set[str]] = {}
    for path in (run, folder / "stale"):
        for line in Path(f"{path}.notes").read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            for server in note.get("servers", []):
                handed.setdefault(note["step"], set()).add(server["weights"])
    assert {step: len(found) for step, found in handed.items()} == {0: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert len(set.union(*handed.values())) == 5, "a step left the weights alone"
