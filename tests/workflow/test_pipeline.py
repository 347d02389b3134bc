"""The whole experiment at its smallest, through the real Snakefile and the real programs, in a copy of the project."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from score_centering.runs.schema import read_metrics

pytestmark = pytest.mark.workflow

ROOT = Path(__file__).parents[2]
ARMS = ["grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which `all` has been run once."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", folder)
    snakemake(folder, "all")
    return folder


def snakemake(folder: Path, *arguments: str) -> str:
    """Run `snakemake --cores 1 ARGUMENTS` with the test configuration; what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", *arguments, "--configfile", "config/test.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every figure and table below results/test."""
    results = folder / "results/test"
    files = [*(results / "figures").iterdir(), *results.glob("summary.*"), results / "report.html"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.timeout(900)
def test_all_trains_every_arm_and_draws_every_figure(project):
    runs = {arm: read_metrics(project / f"results/test/runs/{arm}/seed0/metrics.parquet").to_pydict() for arm in ARMS}
    for arm, metrics in runs.items():
        updates = [row for row, step in enumerate(metrics["step"]) if step > 0]
        assert [metrics["step"][row] for row in updates] == [1, 2, 3, 4]
        for row in updates:
            assert 0 <= metrics["reward_mean"][row] <= 1
            assert metrics["grad_norm"][row] >= 0 and metrics["generated_tokens"][row] > 0
            assert (metrics["head_mass_sampler"][row] is not None) == arm.startswith("sc")
            assert metrics["clip_share"][row] == (0 if arm in ("grpo", "grpo_bf16") else None)
    # The same weights and seeds at step 1: only the rollouts' precision differs.
    first = {arm: metrics["k3_kl"][metrics["step"].index(1)] for arm, metrics in runs.items()}
    assert 0 <= first["grpo_bf16"] < first["grpo"] < 0.1
    drawn = {file.removesuffix(".png") for file in digests(project) if file.endswith(".png")}
    assert drawn == {
        "reward", "k3_kl", "reward_vs_k3", "validation_reward", "response_length", "head_mass", "timing",
    }  # fmt: skip
    assert len(digests(project)) == 3 * len(drawn) + 3


def test_second_run_finds_nothing_to_do(project):
    assert "Nothing to be done" in snakemake(project, "all")


def test_figures_drawn_again_are_the_same_bytes(project):
    before = digests(project)
    snakemake(project, "all", "--forcerun", "figures", "report")
    assert digests(project) == before


def test_audit_finds_no_fault(project):
    snakemake(project, "audit")
