"""Measurements of one model become its limits, and limits belong to the model that they were measured on."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from score_centering.settings import DEFAULT_CONFIG, UserError, load_settings
from score_centering.settings.model_name import model_name
from score_centering.settings.stages import PrecisionGateStage, SmokeGateStage
from score_centering.validation import adopt
from score_centering.validation.gate import precision_limits

ROOT = Path(__file__).parents[3]
PRESETS = ["smol", "b200", "test", "collapse"]
NUMBERS = {
    "int8.checkpoint.quantised_layers": 13.0,
    "int8.weights.relative": 0.0075,
    "int8.k3_kl": 0.0021,
    "int8.top1_agreement": 0.98,
    "int8.greedy_answer_agreement": None,
    "int8.exact_kl": 0.002,
}
VALIDATION = {
    "precisions": {"bf16": "", "int8": ""},
    "formats": {"int8": ""},
    "limits": {"int8.weights.relative": {"min": 0.004, "max": 0.02}, "int8.checkpoint.mismatched_codes": {"max": 0}},
}


def test_examples():
    assert doctest.testmod(adopt).attempted == 2 and doctest.testmod(adopt).failed == 0


def test_a_range_is_widened_by_its_own_width():
    given = [{"int8.k3_kl": k3, "int8.top1_agreement": top} for k3, top in ((0.2, 0.9), (0.3, 0.96), (0.25, 0.92))]
    assert adopt.limits_of(given) == {"int8.k3_kl": {"max": 0.4}, "int8.top1_agreement": {"min": 0.84}}


def limits(*overrides, presets=()):
    files = [DEFAULT_CONFIG, *presets]
    return PrecisionGateStage.of(load_settings(files, overrides)), SmokeGateStage.of(load_settings(files, overrides))


def test_the_default_limits_are_those_of_the_default_model():
    settings = load_settings()
    assert list(settings.precision.limits_of) == list(settings.smoke.limits_of) == [model_name(settings)]
    precision, smoke = limits()
    assert precision.measured and precision.limits["int8.k3_kl"].max == 0.0053
    assert smoke.limits["k3_kl_max"].max == 0.05


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("model.scratch.seed=7", True),
        ("model.warm_start.seed=7", True),
        ("trainer.total_training_steps=5", True),
        ("dataset.val_size=32", True),
        ("model.warm_start.max_steps=300", False),
        ("model.scratch.parameters.hidden_size=64", False),
        ("dataset.reasoning_gym.parameters.max_digits=3", False),
        ("model={source: path, path: {path: mine}}", False),
    ],
)
def test_limits_belong_to_the_settings_that_make_the_weights(override, same):
    precision, smoke = limits(override)
    assert precision.measured == same == ("k3_kl_max" in smoke.limits)


def test_another_model_gets_what_must_hold_for_any():
    precision, _ = limits("model={source: path, path: {path: mine}}")
    configured = precision.model_dump()["limits"]
    assert precision_limits(VALIDATION, configured) == {
        "int8.checkpoint.mismatched_codes": {"max": 0},
        "bf16.abs_logprob_gap_mean": {"min": 0, "max": None},
        "int8.abs_logprob_gap_mean": {"min": 0, "max": None},
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_the_limits_of_another_model(preset):
    assert not limits(presets=[ROOT / f"config/{preset}.yaml"])[0].measured


def program(*arguments):
    command = [sys.executable, str(ROOT / "workflow/scripts/limits.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_command_adopts_a_first_measurement(tmp_path):
    mine = "model={source: path, path: {path: mine}}"
    name = model_name(load_settings(overrides=[mine]))
    (tmp_path / "gate.json").write_text(json.dumps({"model": name, "numbers": NUMBERS}))
    done = program(tmp_path / "gate.json", "--output", tmp_path / "limits.yaml")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'limits.yaml'}: 4 limits of model {name}\n"), done.stderr
    assert yaml.safe_load((tmp_path / "limits.yaml").read_text()) == {
        "precision": {
            "limits_of": {
                name: {
                    "int8.checkpoint.quantised_layers": {"min": 13, "max": 13},
                    "int8.weights.relative": {"max": 0.015},
                    "int8.k3_kl": {"max": 0.0042},
                    "int8.top1_agreement": {"min": 0.96},
                }
            }
        }
    }
    precision, _ = limits(mine, presets=[tmp_path / "limits.yaml"])
    assert precision.measured and precision.limits["int8.k3_kl"].max == 0.0042
    assert "bf16.k3_kl" not in precision.limits, "the default model's"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([{"numbers": {}}], "not the gate.json of a precision gate"),
        (
            [{"model": "a", "numbers": {}}, {"model": "b", "numbers": {}}],
            "of several models: a, b; limits belong to one",
        ),
    ],
)
def test_what_is_no_measurement_of_one_model_is_refused(tmp_path, contents, message):
    paths = [tmp_path / f"{index}.json" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        adopt.read_measurements(paths)
