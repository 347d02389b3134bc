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
    for arm in ARMS:
        metrics = read_metrics(project / f"results/test/runs/{arm}/seed0/metrics.parquet")
        assert metrics.num_rows == 4
    assert len(digests(project)) >= 12


def test_second_run_finds_nothing_to_do(project):
    assert "Nothing to be done" in snakemake(project, "all")


def test_figures_drawn_again_are_the_same_bytes(project):
    before = digests(project)
    snakemake(project, "all", "--forcerun", "figures", "report")
    assert digests(project) == before


def test_audit_finds_no_fault(project):
    snakemake(project, "audit")
