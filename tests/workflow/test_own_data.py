"""docs/own-data-and-model.md, command by command, and raw files by hand."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from score_centering.runs.schema import read_metrics

pytestmark = pytest.mark.workflow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/own-data-and-model.md"
FASTER = {
    "model": {"warm_start": {"max_steps": 60}},
    "trainer": {"total_training_steps": 4, "test_freq": 2, "save_freq": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A copy of the project, with fifty problems and the page's preset at fewer steps."""
    folder = tmp_path_factory.mktemp("own") / "copy"
    for name in ("workflow", "config"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", folder)
    draw = random.Random(0)
    pairs = draw.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], 50)
    rows = [{"question": f"What is {a} + {b}?", "answer": f"{a} and {b} make {a + b}.\n#### {a + b}"} for a, b in pairs]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preset = yaml.safe_load((folder / "config/own.yaml").read_text())
    preset["model"]["warm_start"] |= FASTER["model"]["warm_start"]
    preset["trainer"] |= FASTER["trainer"]
    (folder / "config/own.yaml").write_text(yaml.safe_dump(preset))
    return folder


def run(folder: Path, command: str) -> str:
    """A command of the page in `folder`; what it printed."""
    words = shlex.split(command, comments=True)
    start = [sys.executable, "-m", "snakemake"] if words[0] == "snakemake" else [sys.executable]
    ended = subprocess.run(
        [*start, *words[1:]], cwd=folder, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.timeout(900)
def test_the_page_from_fifty_problems_to_a_trained_arm(folder):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    data, measured, adopted, trained, everything = block.strip().splitlines()
    results = folder / "results/own"
    run(folder, data)
    rows = pq.read_table(results / "dataset/train.parquet").to_pylist()
    assert len(rows) == 40 and all(eval(row["prompt"][8:-1]) == int(row["answer"]) for row in rows)
    assert "no limits were measured on model scratch-" in run(folder, measured)
    assert "limits of model scratch-" in run(folder, adopted)
    run(folder, trained)
    gate = json.loads((results / "precision/gate.json").read_text())
    assert gate["measured"] and gate["passed"]
    assert gate["limits"]["int8_int4kv.k3_kl"]["max"] == pytest.approx(
        2 * gate["numbers"]["int8_int4kv.k3_kl"], rel=0.01
    )
    assert read_metrics(results / "runs/sc/seed0/metrics.parquet")["step"].to_pylist() == [0, 1, 2, 3, 4]
    run(folder, everything)
    assert (results / "report.html").is_file() and (results / "runs/grpo_bf16/seed0/run.json").is_file()


@pytest.mark.timeout(900)
def test_a_folder_with_a_model_and_raw_files_by_hand(folder):
    """After the page: its model as a folder of the user's, and the file itself as both splits."""
    model = {"source": "path", "path": {"path": "mine"}, "warm_start": {"max_steps": 0}}
    shutil.copytree(folder / "results/own/model/base", folder / "mine")
    (folder / "config/mine.yaml").write_text(yaml.safe_dump({"experiment": "mine", "model": model}))
    files = "config/own.yaml config/mine.yaml"
    printed = run(folder, f"snakemake --cores 1 results/mine/precision/gate.json --configfile {files}")
    assert "no limits were measured on model path-" in printed
    raw = "--train-file problems.jsonl --val-file problems.jsonl"
    chosen = "--configfile config/own.yaml --configfile config/mine.yaml"
    run(folder, f"python workflow/scripts/train.py --baseline grpo_bf16 {raw} --run-dir raw {chosen}")
    rows = read_metrics(folder / "raw/metrics.parquet")["step"].to_pylist()
    assert rows == [0, 1, 2, 3, 4]
    identity = json.loads((folder / "raw/run.json").read_text())["identity"]["config"]
    assert identity["columns"] == {"prompt": "question", "answer": "answer", "extract": "hashes"}
