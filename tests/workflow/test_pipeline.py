"""The whole experiment at its smallest, through the real Snakefile and the real programs, in a copy of the project."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from score_centering.runs.schema import read_metrics

pytestmark = pytest.mark.workflow

ROOT = Path(__file__).parents[2]
ARMS = ["grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which `all` has been run once."""
    folder = copy(tmp_path_factory.mktemp("project") / "copy")
    snakemake(folder, "all")
    return folder


def copy(folder: Path) -> Path:
    """What of the project its workflow needs, in `folder`."""
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", folder)
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
            share = metrics["clip_share"][row]
            if arm == "sc_tis":  # its cap bounds some ratios
                assert 0 <= share < 1
            else:
                assert share == (0 if arm in ("grpo", "grpo_bf16") else None)
    # The same weights and seeds at step 1: only the rollouts' precision differs.
    first = {arm: metrics["k3_kl"][metrics["step"].index(1)] for arm, metrics in runs.items()}
    assert 0 <= first["grpo_bf16"] < first["grpo"] < 0.1
    drawn = {file.removesuffix(".png") for file in digests(project) if file.endswith(".png")}
    assert drawn == {
        "reward", "k3_kl", "reward_vs_k3", "validation_reward", "clean_reward", "response_length", "head_mass",
        "drift_meter", "timing",
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


@pytest.mark.timeout(900)
def test_another_project_on_other_cores_ends_in_the_same_bytes(project, tmp_path):
    folder = copy(tmp_path / "another")
    snakemake(folder, "sc", "grpo_bf16", "--cores", "2")
    for path in (
        "dataset/manifest.json",
        "model/manifest.json",
        "model/w8a8/config.json",
        "precision/validation.json",
        "runs/sc/seed0/metrics.parquet",
        "runs/grpo_bf16/seed0/metrics.parquet",
    ):
        assert (folder / "results/test" / path).read_bytes() == (project / "results/test" / path).read_bytes(), path


@pytest.mark.timeout(900)
def test_the_studies_end_in_their_tables_and_figures(project):
    snakemake(project, "drift", "faults", "sweep", "stale", "collapse")
    results = project / "results/test"
    drawn = {file.relative_to(results).as_posix() for file in results.glob("*/*.png")}
    assert {f"{study}/{study}.png" for study in ("drift", "faults", "sweep", "stale", "collapse")} <= drawn
    drift = pq.read_table(results / "drift/drift.parquet").to_pylist()
    assert len(drift) == 2 * 3 * 3  # samplers, variants, steps 0 to 2
    first = [row for row in drift if row["step"] == 1]
    assert all(row["displacement"] > 0 for row in first)
    assert all((row["distance_to_exact"] is None) == (row["centering"] == "exact") for row in first)
    rows = pq.read_table(results / "faults/check.parquet").to_pylist()
    checked = {(row["kind"], row["transient"]): row for row in rows}
    assert checked["none", False]["equal_tokens_share"] == checked["codes", False]["equal_tokens_share"] == 1
    assert checked["codes", True]["equal_tokens_share"] < 1 and checked["codes", True]["seen_by_repeat"]
    assert "not finite" in checked["nan", True]["refusal"]
    trained = pq.read_table(results / "faults/faults.parquet").to_pylist()
    assert [(row["kind"], row["rate"], row["arm"], row["steps"]) for row in trained] == [
        ("none", 0.0, "sc", 2), ("codes", 0.5, "sc", 2),
    ]  # fmt: skip
    assert trained[1]["k3_kl_max"] > trained[0]["k3_kl_max"]
    (noisy,) = pq.read_table(results / "sweep/sweep.parquet").to_pylist()
    assert (noisy["precision"], noisy["arm"], noisy["steps"]) == ("int8_noise", "sc", 2)
    (stale,) = pq.read_table(results / "stale/stale.parquet").to_pylist()
    assert (stale["sync_every"], stale["mini_batches"], stale["arm"], stale["steps"]) == (2, 1, "sc_tis", 3)
    metrics = read_metrics(results / "stale/runs/sync2/sc_tis/seed0/metrics.parquet")
    assert metrics["sampler_age"].to_pylist() == [0, 1, 0]
    identity = json.loads((results / "sweep/runs/int8_noise/sc/seed0/run.json").read_text())["identity"]
    assert identity["config"]["perturbation"]["weight_noise"] == 0.1
    check_the_map(results)
    assert "Nothing to be done" in snakemake(project, "drift", "faults", "sweep", "stale", "collapse")


def check_the_map(results: Path) -> None:
    """Two precisions and two models, each with both arms: who is held against whom, and which model was trained."""
    rows = pq.read_table(results / "collapse/collapse.parquet").to_pylist()
    assert [(row["precision"], row["entropy"], row["arm"], row["steps"]) for row in rows] == [
        (precision, entropy, arm, 2) for precision in ("bf16", "noise0.3") for entropy in ("own", "shorter")
        for arm in ("pg", "sc")
    ]  # fmt: skip
    ends = {(row["precision"], row["entropy"], row["arm"]): row["reward_last"] for row in rows}
    assert all(row["control_last"] == ends["bf16", row["entropy"], "pg"] for row in rows)
    assert all(row["outcome"] == "held" for row in rows if (row["precision"], row["arm"]) == ("bf16", "pg"))
    identities = {
        row["entropy"]: json.loads(path.read_text())["identity"]["model_manifest_sha256"]
        for row in rows
        for path in results.glob(f"collapse/runs/*+{row['entropy']}+*/*/seed0/run.json")
    }
    shorter = json.loads((results / "collapse/entropies/shorter/model/manifest.json").read_text())
    assert shorter["warm_start"]["steps"] == 40 and identities["own"] != identities["shorter"]
    text = (results / "collapse/collapse.md").read_text()
    assert text.startswith("# Where training collapses\n\n8 runs.") and "| precision bf16 | 0 of 1 | 0 of 1 |" in text
