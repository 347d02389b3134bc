import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loading import load

PROGRAM = Path(__file__).parents[3] / "workflow" / "scripts" / "diagnose.py"
FIXTURES = Path(__file__).parent / "fixtures"
batch = load("unit/diagnosis/diagnosis_simulation.py").batch


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def a_lost_run(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    steps = np.arange(1, 61)
    fallen = steps > 30
    rows = {
        "step": steps,
        "reward_mean": np.where(fallen, 0.03, 0.5) + rng.normal(0, 0.005, 60),
        "k3_kl": np.where(steps > 28, 0.3, 0.02),
        "truncated_share": np.where(steps > 25, 0.6, 0.01),
        "response_length_mean": np.full(60, 20.0),
    }
    pq.write_table(pa.table(rows), folder / "metrics.parquet")
    return folder


def rollouts(folder: Path, **fault) -> Path:
    tokens, _ = batch(0, 100, **fault)
    table = {"rollout": tokens.rollout, "sampler_logprob": tokens.q, "trainer_logprob": tokens.p}
    folder.mkdir()
    pq.write_table(pa.table(table), folder / "tokens.parquet")
    return folder


def test_a_verdict_for_people_and_for_programs(tmp_path):
    folder = a_lost_run(tmp_path)
    shown = run(folder)
    assert shown.returncode == 0
    assert "verdict  drift" in shown.stdout and "reward=reward_mean" in shown.stdout
    result = json.loads(run(folder, "--json").stdout)
    assert {"verdict", "confidence", "evidence", "advice"} <= set(result)
    assert result["verdict"] == "drift" and 0.5 < result["confidence"] <= 1
    assert result["columns"]["k3_kl"] == "k3_kl"
    assert [change["quantity"] for change in result["changes"]] == ["truncated", "k3_kl", "reward"]


def test_a_figure_of_what_changed_first(tmp_path):
    shown = run(a_lost_run(tmp_path), "--figure", tmp_path / "order")
    assert shown.returncode == 0
    assert [Path(line).name for line in shown.stdout.splitlines()[-3:]] == ["order.png", "order.svg", "order.pdf"]
    assert all((tmp_path / f"order.{kind}").stat().st_size > 1000 for kind in ("png", "svg", "pdf"))


def test_rollouts_outrank_the_log(tmp_path):
    folder = a_lost_run(tmp_path)
    result = json.loads(run(folder, "--rollouts", rollouts(tmp_path / "bad", shift=1), "--json").stdout)
    assert result["verdict"] == "bug" and "shifted" in result["evidence"][0]
    result = json.loads(run(folder, "--rollouts", rollouts(tmp_path / "good", noise=0.1), "--json").stdout)
    assert result["verdict"] == "drift"
    corrections = {effect["correction"]: effect for effect in result["rollouts"]["corrections"]}
    assert corrections["tis"]["masked"] == 0
    assert result["rollouts"]["tokens"] == 2000 and result["rollouts"]["rollouts"] == 100


def test_the_rollouts_table_for_people(tmp_path):
    shown = run(a_lost_run(tmp_path), "--rollouts", rollouts(tmp_path / "good", noise=0.1)).stdout
    assert "seq_tis" in shown and "K3 by position" in shown and "d on position" in shown


def test_columns_are_shown_and_overridden():
    shown = run(FIXTURES / "verl.jsonl", "--column", "reward=critic/rewards/mean").stdout
    assert "reward=critic/rewards/mean" in shown and "k3_kl=rollout_corr/k3_kl" in shown


def test_several_runs_one_line_each():
    lines = run(FIXTURES / "wandb_chart.csv", FIXTURES / "slime.log", "--json").stdout.splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["cannot_tell"] * 3


def test_bad_input_is_one_line(tmp_path):
    for arguments, message in (
        (["nowhere"], "error: nowhere: no such file or folder"),
        ([FIXTURES / "verl.jsonl", "--column", "reward"], "error: --column reward: must be QUANTITY=NAME"),
        (
            [FIXTURES / "wandb_chart.csv", "--figure", tmp_path / "x"],
            "error: --rollouts and --figure take one run, not 2",
        ),
    ):
        ended = run(*arguments)
        assert ended.returncode == 2 and ended.stdout == ""
        assert ended.stderr.startswith(message) and ended.stderr.count("\n") == 1


def test_no_torch_is_loaded():
    code = "import sys, score_centering.diagnosis.wording; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
