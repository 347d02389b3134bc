"""Gates: what passes, what fails and with which words."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from score_centering.settings import UserError
from score_centering.validation.gate import failures, judge, precision_limits, precision_numbers, smoke_numbers

SCRIPT = Path(__file__).parents[3] / "workflow" / "scripts" / "gate.py"
STEP = {
    "reward_mean": 0.25,
    "generated_tokens": 100,
    "loss": 0.1,
    "grad_norm": 2.0,
    "k3_kl": 0.01,
    "abs_logprob_gap_max": 0.5,
    "k3_clamped_tokens": 0,
    "nonfinite_updates": 0,
    "head_mass_sampler": None,
}


@pytest.mark.parametrize(
    ("value", "limit", "line"),
    [
        (0.5, {"max": 0.5}, None),
        (0.5, {"min": 0.5}, None),
        (0.51, {"max": 0.5}, "x = 0.51, limit max 0.5"),
        (0.1, {"min": 0.2, "max": 0.5}, "x = 0.1, limit min 0.2 and max 0.5"),
        (math.nan, {"max": 0.5}, "x is not a finite number, limit max 0.5"),
        (None, {"max": 0.5}, "x is not a finite number, limit max 0.5"),
        (math.inf, {"min": 0.5}, "x is not a finite number, limit min 0.5"),
    ],
)
def test_a_limit_names_number_and_bound(value, limit, line):
    assert failures({"x": value}, {"x": limit}) == ([line] if line else [])


def test_a_missing_number_fails():
    assert failures({"y": 1.0}, {"x": {"max": 2.0}}) == ["x is missing, limit max 2"]


def test_no_limits_is_an_error():
    with pytest.raises(UserError, match="a gate needs limits"):
        judge({"x": 1.0}, {})


def test_judge_keeps_every_number():
    gate = judge({"x": 1.0, "y": 3.0}, {"x": {"max": 2.0, "min": None}})
    assert gate == {
        "schema_version": 2,
        "passed": True,
        "failures": [],
        "limits": {"x": {"max": 2.0}},
        "numbers": {"x": 1.0, "y": 3.0},
    }


MEASURED = {
    "precisions": {"bf16": "BF16", "fp8": "FP8", "int8_int4kv": "INT8 + INT4 KV"},
    "formats": {"fp8": "FP8", "int8": "INT8"},
    "limits": {"fp8.weights.relative": {"max": 0.03}, "int8.weights.relative": {"max": 0.02}},
}


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ({"int8_int4kv.k3_kl": {"max": 1}}, {"int8_int4kv.k3_kl": {"max": 1}}),
        ({"int4.k3_kl": {"max": 1}, "int8.k3_kl": {"max": 1}}, {}),
        ({"int8.weights.relative": {"max": 0.01}}, {"int8.weights.relative": {"max": 0.01}}),
        ({"int8.weights.relative": None}, {"int8.weights.relative": None}),
        ({"*.weights.relative": None}, {"int8.weights.relative": None, "fp8.weights.relative": None}),
        (
            {"*.k3_kl": {"max": 2}, "fp8.k3_kl": {"max": 1}},
            {"bf16.k3_kl": {"max": 2}, "fp8.k3_kl": {"max": 1}, "int8_int4kv.k3_kl": {"max": 2}},
        ),
        ({"*.checkpoint.x": {"max": 0}}, {"fp8.checkpoint.x": {"max": 0}, "int8.checkpoint.x": {"max": 0}}),
        ({"int9.k3_kl": {"max": 1}}, {"int9.k3_kl": {"max": 1}}),
    ],
    ids=[
        "measured",
        "a format's precision is not",
        "over a format's own",
        "taken away",
        "all taken away",
        "every",
        "of checkpoints",
        "unknown names stay and fail",
    ],
)
def test_limits_follow_what_was_measured(configured, expected):
    limits = MEASURED["limits"] | expected
    assert precision_limits(MEASURED, configured) == {name: limit for name, limit in limits.items() if limit}


def test_smoke_numbers_reduce_the_steps():
    rows = [{"step": 0, "val_reward_mean": 0.1}, {**STEP, "step": 1}, {**STEP, "step": 2, "loss": -0.4, "k3_kl": 0.03}]
    numbers = smoke_numbers({"metrics": rows})
    assert numbers["steps"] == 2
    assert numbers["loss_abs_max"] == 0.4
    assert numbers["k3_kl_max"] == 0.03
    assert numbers["generated_tokens_min"] == 100
    assert "head_mass_sampler_min" not in numbers, "no step measured it"


def test_a_step_without_a_loss_is_not_finite():
    numbers = smoke_numbers({"metrics": [{**STEP, "step": 1}, {**STEP, "step": 2, "loss": None}]})
    assert numbers["loss_abs_max"] is None
    assert failures(numbers, {"loss_abs_max": {"max": 9.0}}) == ["loss_abs_max is not a finite number, limit max 9"]


@pytest.mark.parametrize("run", [{}, {"metrics": []}, {"metrics": [{"step": 0}]}])
def test_a_run_without_steps_is_refused(run):
    with pytest.raises(UserError, match="no `metrics`"):
        smoke_numbers(run)


def test_a_file_that_is_no_validation_is_refused():
    with pytest.raises(UserError, match="no `numbers`"):
        precision_numbers({})


def run_gate(tmp_path: Path, kind: str, content: dict, limits: dict) -> subprocess.CompletedProcess:
    (tmp_path / "input.json").write_text(json.dumps(content))
    command = [sys.executable, SCRIPT, kind, "--settings", json.dumps({"limits": limits})]
    command += ["--input", tmp_path / "input.json", "--output", tmp_path / "gate.json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_program_passes_and_writes_the_gate(tmp_path):
    measured = {"numbers": {"int8.k3_kl": 0.01}, "precisions": {"int8": "INT8"}}
    done = run_gate(tmp_path, "precision", measured, {"int8.k3_kl": {"max": 0.02}, "fp8.k3_kl": {"max": 0.01}})
    assert done.returncode == 0, done.stderr
    gate = json.loads((tmp_path / "gate.json").read_text())
    assert gate["passed"] is True and gate["numbers"] == {"int8.k3_kl": 0.01}
    assert "int8.k3_kl" in done.stdout


def test_the_program_fails_with_exit_code_3_and_names_number_and_limit(tmp_path):
    rows = [{**STEP, "step": 1}]
    done = run_gate(tmp_path, "smoke", {"metrics": rows}, {"k3_kl_max": {"max": 0.001}, "grad_norm_max": {"max": 9}})
    assert done.returncode == 3
    assert done.stderr.splitlines() == ["error: smoke gate: k3_kl_max = 0.01, limit max 0.001"]
    assert "grad_norm_max" in done.stdout and "0.01" in done.stdout
    assert json.loads((tmp_path / "gate.json").read_text())["passed"] is False


def test_the_program_imports_no_torch(tmp_path):
    (tmp_path / "input.json").write_text(json.dumps({"numbers": {"x": 1.0}}))
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['gate.py', 'precision', '--input', {str(tmp_path / 'input.json')!r}, '--output', "
        f'{str(tmp_path / "gate.json")!r}, \'--settings\', \'{{"limits": {{"x": {{"max": 2}}}}}}\']\n'
        f"try:\n    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as error:\n    assert not error.code, error.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
