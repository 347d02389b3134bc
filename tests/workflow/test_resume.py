"""Kills the real pipeline: the trainer, Snakemake, the whole process group, Ctrl-C at a terminal; then starts the same
command again."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from score_centering.runs.folder import read_phase
from score_centering.runs.lock import in_use
from score_centering.runs.log import read_log

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RUN = Path("results/test/runs/sc/seed0")
TEST = ("--configfile", "config/test.yaml")
SETTINGS = (*TEST, "--config", "trainer={total_training_steps: 8}")


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def leave_nothing_running():
    yield
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def start(folder: Path, *arguments: str, settings: tuple[str, ...] = SETTINGS) -> subprocess.Popen[str]:
    """`snakemake ARGUMENTS` with the test configuration, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *arguments, *settings],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


class Terminal:
    """`snakemake ARGUMENTS` in the foreground of a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._keyboard, screen = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *arguments, *SETTINGS],
            cwd=folder,
            env={**os.environ, "PYTHONWARNINGS": "default"},
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        started.append(self.process)
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while shown := os.read(self._keyboard, 1 << 16):
                self._shown += shown

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def finish(self) -> tuple[int, str]:
        code = self.process.wait()
        self._reader.join()
        os.close(self._keyboard)
        return code, self._shown.decode()


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate()
    return process.returncode, output


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.003)


def in_phase(folder: Path, name: str, after_step: int) -> Callable[[], bool]:
    """Whether a live trainer is in phase `name`, with at least `after_step` steps behind it."""

    def condition() -> bool:
        phase = read_phase(folder / RUN)
        recorded = phase and phase.name == name and (phase.step or 0) >= after_step
        return bool(recorded) and in_use(folder / RUN / "state/lock")

    return condition


def trainer(folder: Path) -> int:
    return json.loads((folder / RUN / "state/lock").read_text())["pid"]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources(folder: Path) -> dict[str, str]:
    """Digests of the files outside of the results and of Snakemake's records."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path): digest(folder / path) for path in files if path.parts[0] not in ("results", ".snakemake")}


def test_a_killed_experiment_ends_in_the_bytes_of_an_undisturbed_one(tmp_path):
    folder = tmp_path / 'it\'s a "project" – ünï'
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", folder)
    before = sources(folder)
    sc = ("--cores", "1", "sc")

    # The trainer alone: Snakemake reports the failure.
    process = start(folder, *sc)
    wait_until(in_phase(folder, "update", after_step=2), process)
    os.kill(trainer(folder), signal.SIGKILL)
    assert finish(process)[0] == 1
    assert not (folder / RUN / "metrics.parquet").exists()
    assert len(read_log(folder / RUN / "state/steps.log")) >= 2

    # Snakemake alone: the trainer notices, writes a checkpoint and ends by itself.
    process = start(folder, *sc)
    wait_until(in_phase(folder, "rollout", after_step=2), process)
    orphan = trainer(folder)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while not gone(orphan):
        assert time.monotonic() < deadline, "the trainer outlived Snakemake"
        time.sleep(0.05)
    process.stdout.close()
    assert not in_use(folder / RUN / "state/lock")
    code, output = finish(start(folder, "--unlock"))
    assert code == 0, output

    # A second trainer in the same folder is refused, whoever starts it.
    process = start(folder, *sc)
    wait_until(in_phase(folder, "rollout", after_step=3), process)
    owner = trainer(folder)
    os.kill(owner, signal.SIGSTOP)
    command = ["workflow/scripts/train.py", "--baseline", "sc", *TEST, "trainer.total_training_steps=8"]
    second = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"is in use by process {owner} on {os.uname().nodename};" in second.stderr.splitlines()[-1]

    # A stop signal to everything: the trainer finishes its step and writes a checkpoint.
    os.kill(owner, signal.SIGCONT)
    os.killpg(process.pid, signal.SIGTERM)
    code, output = finish(process)
    assert code == 1, output
    assert gone(owner)
    log = (folder / "results/test/logs/train/sc/seed0.log").read_text()
    stopped = re.search(r"SIGTERM: stopped after step (\d+); the same command goes on from there", log)
    assert stopped, log
    assert (folder / RUN / f"state/checkpoints/step{int(stopped[1]):06d}").is_dir()
    if (folder / ".snakemake/locks").is_dir():
        assert finish(start(folder, "--unlock"))[0] == 0

    # Ctrl-C at a terminal: Snakemake waits for the trainer, which does the same.
    terminal = Terminal(folder, *sc)
    wait_until(in_phase(folder, "rollout", after_step=int(stopped[1])), terminal.process)
    owner = trainer(folder)
    terminal.press_ctrl_c()
    code, output = terminal.finish()
    assert code == 1, output
    assert gone(owner), "the trainer outlived Snakemake"
    stopped = re.search(r"SIGINT: stopped after step (\d+)", output)  # the terminal breaks the line further on
    assert stopped, output
    assert (folder / RUN / f"state/checkpoints/step{int(stopped[1]):06d}").is_dir()
    assert not (folder / RUN / "metrics.parquet").exists()
    if (folder / ".snakemake/locks").is_dir():
        finish(start(folder, "--unlock"))

    # Everything at once, then the same command to the end.
    process = start(folder, *sc)
    wait_until(lambda: in_use(folder / RUN / "state/lock"), process)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    assert finish(start(folder, "--unlock"))[0] == 0
    code, output = finish(start(folder, *sc))
    assert code == 0, output
    killed = digest(folder / RUN / "metrics.parquet")
    assert "Nothing to be done" in finish(start(folder, *sc))[1]

    # A forced rerun trains afresh, on another number of cores, to the same bytes.
    code, output = finish(start(folder, "--cores", "2", "sc", "--forcerun", "train_sc"))
    assert code == 0, output
    assert "training starts afresh" in (folder / "results/test/logs/train/sc/seed0.log").read_text()
    assert digest(folder / RUN / "metrics.parquet") == killed

    # After a change, the audit says what the run was made from; it trains nothing.
    (folder / "results/test/model/w8a8/config.json").write_text("{}")
    code, output = finish(start(folder, "--cores", "1", "audit", settings=TEST))
    assert code == 0, output
    line = next(text for text in output.splitlines() if text.startswith("results/test/runs/sc/seed0: "))
    assert line.startswith("results/test/runs/sc/seed0: finished, 8 steps; ")
    assert "config.trainer.total_training_steps: 8 there, 4 here" in line
    assert "quantised_config_sha256: " in line
    assert "1 runs: 1 made by other code, settings or inputs than today's, 0 damaged" in output
    assert digest(folder / RUN / "metrics.parquet") == killed
    assert sources(folder) == before, "something was written outside of results/"
