"""What is finished stays: starts by hand with other settings, a forced rerun that cannot start, and going back through
Snakemake alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from score_centering.runs.folder import read_phase

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RUN = Path("results/test/runs/sc/seed0")
TEST = ("--configfile", "config/test.yaml")
RATE = "actor_rollout_ref={actor: {optim: {lr: 1.0e-5}}}"


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)


def snakemake(folder: Path, *arguments: str) -> str:
    """Output of a `snakemake --cores 1 ARGUMENTS` that succeeds."""
    done = call(folder, "-m", "snakemake", "--cores", "1", *arguments, *TEST)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def declared(folder: Path) -> dict[str, bytes]:
    """Every file that the workflow declares: all but states and logs."""
    results = folder / "results/test"
    files = (path for path in results.rglob("*") if path.is_file())
    undeclared = {"state", "logs", "by-hand"}
    return {str(path): path.read_bytes() for path in files if undeclared.isdisjoint(path.relative_to(results).parts)}


def test_what_is_finished_stays(tmp_path):
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", tmp_path)
    snakemake(tmp_path, "sc")
    finished = declared(tmp_path)
    assert f"{tmp_path / RUN / 'run.json'}" in finished
    train = ("workflow/scripts/train.py", "--baseline", "sc", *TEST)

    # By hand, other settings: refused, with the way out; a smoke run goes to a folder of its own.
    done = call(tmp_path, *train, "actor_rollout_ref.actor.optim.lr=1e-5")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {RUN}: ") and "optim.lr: 0.0003 there, 1e-05 here" in line and "--run-dir" in line
    done = call(tmp_path, *train, "actor_rollout_ref.actor.optim.lr=1e-5", "--run-dir", str(RUN))
    assert done.returncode == 2 and "holds a finished run of another identity" in done.stderr
    for seed in ("0", "1"):
        done = call(tmp_path, *train, "--smoke", "--seed", seed, "trainer.total_training_steps=1")
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "results/test/by-hand").iterdir())) == 2
    done = call(tmp_path, *train)
    assert done.returncode == 0 and "is finished; nothing put back" in done.stderr
    assert declared(tmp_path) == finished
    assert "Nothing to be done" in snakemake(tmp_path, "sc", "-n")

    # A forced rerun that cannot start: Snakemake deletes the files, and they come back.
    weights = next((tmp_path / "results/test/model/base").glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    done = call(tmp_path, "-m", "snakemake", "--cores", "1", "sc", *TEST, "-R", "train_sc")
    assert done.returncode == 1 and "error: " in done.stderr
    weights.write_bytes(whole)
    assert declared(tmp_path) == finished
    assert "Nothing to be done" in snakemake(tmp_path, "sc")
    snakemake(tmp_path, "sc", "-R", "train_sc")
    timing = f"{tmp_path / RUN / 'timing.parquet'}"
    again = declared(tmp_path)
    assert again.pop(timing) != finished.pop(timing), "it was trained anew"
    assert again == finished
    finished = declared(tmp_path)

    # Another rate through Snakemake, stopped; then back, and forward again.
    other = ("sc", *TEST, "--config", RATE)
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1", *other],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not ((phase := read_phase(tmp_path / RUN)) and phase.name == "rollout" and phase.step == 1):
            assert process.poll() is None
            time.sleep(0.003)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not (tmp_path / RUN / "run.json").exists()
    shutil.rmtree(tmp_path / ".snakemake/locks", ignore_errors=True)
    snakemake(tmp_path, "sc")
    log = (tmp_path / "results/test/logs/train/sc/seed0.log").read_text()
    assert "is finished; metrics.parquet, timing.parquet, config.yaml, run.json put back" in log
    back = declared(tmp_path)
    smoke = [name for name in finished if "/smoke/" in name]
    assert {name: back[name] for name in back if name not in smoke} == {
        name: content for name, content in finished.items() if name not in smoke
    }
    done = call(tmp_path, "-m", "snakemake", "--cores", "1", *other)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in (tmp_path / "results/test/logs/train/sc/seed0.log").read_text()
    assert b'"lr": 1e-05' in (tmp_path / RUN / "run.json").read_bytes()
    done = call(tmp_path, "workflow/scripts/restore.py", str(RUN))
    assert done.returncode == 0 and "every declared file was there" in done.stdout
    done = call(tmp_path, "workflow/scripts/restore.py", str(RUN), "--archive", "99")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
