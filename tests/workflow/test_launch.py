"""The by-hand launcher with its real programs: gateway, agents and trainer end together, however one of them ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from score_centering.precision.int8 import FORMAT as INT8

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PROGRAMS = {"gateway.py", "agents.py", "train.py"}
W8A8 = INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])
PATIENCE = 300  # seconds, for a machine that has other work to do


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with dataset and model; what the rollouts need of the W8A8 model is its configuration."""
    folder = tmp_path_factory.mktemp("a project")
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", folder)
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "results/test/model/manifest.json"]
    done = subprocess.run(
        [*command, "--configfile", "config/test.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder / "results/test/model/w8a8").mkdir()
    (folder / "results/test/model/w8a8/config.json").write_text(json.dumps({"quantization_config": W8A8}))
    return folder


class Launched:
    """`launch.py ARGUMENTS` in `project`, with a log folder of its own."""

    def __init__(self, project: Path, logs: Path, *arguments: str) -> None:
        self.logs = logs
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "workflow/scripts/launch.py", "--configfile", "config/test.yaml", *arguments],
            cwd=project,
            env={**os.environ, "SC_LOG_DIR": str(logs), "SC_PORT": str(self.port), "SC_KEY": "a-key"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def programs(self) -> dict[str, int]:
        """Programs of this launch that run, by name: whoever has its log folder in the environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if f"SC_LOG_DIR={self.logs}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().decode().split("\0")
                    name = next((Path(word).name for word in words if word.endswith(".py")), words[0])
                    found[name] = int(entry.name)
            except (OSError, ValueError):
                continue
        return found

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0] + self.tails()
            assert time.monotonic() < deadline, self.tails()
            time.sleep(0.1)

    def running(self) -> bool:
        """Whether every program has been started; the trainer is far from its first step then."""
        return self.programs().keys() == PROGRAMS | {"launch.py"}

    def training(self) -> bool:
        """Whether the trainer has gone through its first step."""
        log = self.logs / "trainer.log"
        return log.is_file() and "step 1/" in log.read_text()

    def finish(self) -> tuple[int, str]:
        """Exit code and output, once everything has ended."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.programs() == {}
        return self.process.returncode, output

    def tails(self) -> str:
        return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in self.logs.glob("*.log"))


@pytest.fixture
def launch(project, tmp_path):
    started: list[Launched] = []

    def start(*arguments: str) -> Launched:
        started.append(Launched(project, tmp_path / f"logs {len(started)}", "--baseline", "sc", *arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        launched.process.stdout.close()
        for pid in launched.programs().values():
            os.kill(pid, signal.SIGKILL)


LONG = ("trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.val_before_train=false")


def test_a_smoke_run_trains_as_the_direct_way_does(project, launch):
    launched = launch("--smoke")
    code, output = launched.finish()
    assert code == 0, output + launched.tails()
    assert output.startswith(f"logs: {launched.logs}\n") and "step 3/3" in output
    assert {path.name for path in launched.logs.iterdir()} == {
        "config.yaml", "gateway.log", "agents-0.log", "trainer.log",
    }  # fmt: skip
    resolved = yaml.safe_load((launched.logs / "config.yaml").read_text())
    assert resolved["actor_rollout_ref"]["rollout"]["transport"] == "gateway"
    (by_hand,) = (project / "results/test/by-hand").iterdir()
    assert output.splitlines()[1] == f"run folder: {by_hand.relative_to(project)}"
    through = json.loads((by_hand / "run.json").read_text())["metrics"]
    assert not (project / "results/test/smoke").exists(), "the workflow's own files were touched"
    direct = ["--baseline", "sc", "--smoke", "--configfile", "config/test.yaml", "--run-dir", "results/direct"]
    subprocess.run([sys.executable, "workflow/scripts/train.py", *direct], cwd=project, check=True)
    assert through == json.loads((project / "results/direct/run.json").read_text())["metrics"]


def test_a_stop_signal_writes_a_checkpoint_and_ends_everything(launch):
    launched = launch("--seed", "1", *LONG)
    launched.until(launched.training)
    assert launched.running()
    launched.process.send_signal(signal.SIGTERM)
    code, output = launched.finish()
    assert code == 75, output + launched.tails()
    assert "the same command goes on from there" in output


def test_a_second_signal_ends_everything_at_once(launch):
    launched = launch("--seed", "101", *LONG)
    launched.until(launched.training)
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish()[0] in (75, 128 + signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "name", "when"),
    [("gateway.py", "gateway", Launched.training), ("agents.py", "agents-0", Launched.running)],
)
def test_when_one_crashes_the_others_end(launch, program, name, when):
    launched = launch("--seed", f"20{len(name)}", *LONG)
    launched.until(lambda: when(launched))
    os.kill(launched.programs()[program], signal.SIGKILL)
    code, output = launched.finish()
    assert code == 1
    assert f"error: {name} ended with exit code -9; see {launched.logs / name}.log" in output


def test_a_trainer_that_cannot_start_ends_the_others_with_its_line(launch):
    launched = launch("--seed", "301", "experiment=missing")
    code, output = launched.finish()
    assert code == 2 and "error: results/missing/dataset/manifest.json: " in output


def test_when_the_launcher_is_killed_the_others_end_too(launch):
    launched = launch("--seed", "401", *LONG)
    launched.until(launched.running)
    launched.process.kill()
    launched.process.wait()
    deadline = time.monotonic() + PATIENCE
    while launched.programs():
        assert time.monotonic() < deadline, (launched.programs(), launched.tails())
        time.sleep(0.1)


def test_a_port_in_use_is_refused_in_one_line(project, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "workflow/scripts/launch.py", "--baseline", "sc", "--configfile", "config/test.yaml"],
            cwd=project,
            env={**os.environ, "SC_LOG_DIR": str(tmp_path / "logs"), "SC_PORT": str(port)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, f"error: SC_PORT = {port}: this port is in use\n")
