"""Paired differences, worked out by hand, and the tables of Student's t against its density."""

import json
from html import escape
from math import gamma, pi, sqrt
from pathlib import Path

import numpy as np
import pytest

from score_centering.figures.compare import control_of
from score_centering.figures.experiment import read_experiment
from score_centering.figures.paired import T_80, T_97_5, binomial_interval, paired, power, uncorrected
from score_centering.figures.report import render
from score_centering.settings import load_settings
from score_centering.settings.stages import TrainStage

CONFIG = Path(__file__).parents[3] / "config" / "config.yaml"


def pair(synthetic, folder, first, second):
    """Rewards by seed of `grpo` and `sc`, as what `sc` has more."""
    for arm, rewards in (("grpo", first), ("sc", second)):
        for seed, values in rewards.items():
            synthetic.write_run(folder, arm, seed, len(values), {"reward_mean": values})
    experiment = read_experiment(folder)
    return paired(experiment.of("grpo"), experiment.of("sc"))


def test_what_the_problems_gave_both_drops_out(synthetic, tmp_path):
    problems = [0.1, 0.9, 0.5, 0.3]
    found = pair(synthetic, tmp_path / "e", {0: problems}, {0: [0.2, 1.0, 0.7, 0.5]})  # + 0.1, 0.1, 0.2, 0.2
    assert found.difference == pytest.approx(0.15) and found.values == 4 and found.last_step == 4
    assert found.error == pytest.approx(sqrt(0.01 / 3) / 2)  # squares around 0.15 add up to 0.01; 3 degrees of freedom
    assert found.half_width == pytest.approx(3.182 * found.error)
    assert found.detectable == pytest.approx((3.182 + 0.978) * found.error)
    assert found.unpaired_error > 5 * found.error


def test_several_seeds_give_the_error(synthetic, tmp_path):
    first = {0: [0.0] * 12, 1: [0.2] * 12, 2: [0.9] * 12}
    second = {0: [0.1] * 12, 1: [0.4] * 12, 5: [0.0] * 12}  # seed 2 and seed 5 have no partner
    found = pair(synthetic, tmp_path / "e", first, second)
    assert (found.seeds, found.values) == (2, 2)
    assert found.difference == pytest.approx(0.15) and found.error == pytest.approx(0.05)
    assert found.half_width == pytest.approx(12.706 * 0.05)


def test_only_common_steps_and_the_last_ten_of_them(synthetic, tmp_path):
    found = pair(synthetic, tmp_path / "e", {0: [0.5] * 15}, {0: [0.9] * 5 + [0.6, 0.8] * 5 + [0.0] * 20})
    assert found.last_step == 15 and found.values == 10 and found.difference == pytest.approx(0.2)


def test_too_little_or_other_problems_are_no_pair(synthetic, tmp_path):
    assert pair(synthetic, tmp_path / "short", {0: [0.5]}, {0: [0.6]}) is None
    assert pair(synthetic, tmp_path / "seeds", {0: [0.5] * 4}, {1: [0.6] * 4}) is None
    assert pair(synthetic, tmp_path / "batch", {0: [0.5] * 4}, {0: [0.6, 0.7] * 2}) is not None
    path = tmp_path / "batch/runs/sc/seed0/run.json"
    content = json.loads(path.read_text())
    content["identity"]["config"]["data"]["train_batch_size"] = 8
    path.write_text(json.dumps(content))
    experiment = read_experiment(tmp_path / "batch")
    assert paired(experiment.of("grpo"), experiment.of("sc")) is None


def test_quantiles_of_students_t():
    for degrees, (high, low) in enumerate(zip(T_97_5, T_80, strict=True), 1):
        grid = np.linspace(0, high, 200_001)
        density = gamma((degrees + 1) / 2) / sqrt(degrees * pi) / gamma(degrees / 2)
        density = density * (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
        assert np.trapezoid(density, grid) == pytest.approx(0.475, abs=1e-4)
        inside = grid <= low
        assert np.trapezoid(density[inside], grid[inside]) == pytest.approx(0.3, abs=3e-4)


def test_wilsons_interval_solves_its_own_equation():
    for share, count in ((0.0, 50), (0.3, 64), (1.0, 10)):
        for end in binomial_interval(share, count):
            assert (share - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count, abs=1e-12)
    assert binomial_interval(0.0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)


def test_the_uncorrected_arm_is_found_by_its_settings(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("grpo_bf16", "mine", "sc"), steps=12)
    assert uncorrected(read_experiment(folder, control="grpo_bf16")) == "mine"
    assert uncorrected(read_experiment(folder, ["sc"])) is None


def test_the_report_shows_differences_power_and_binomial_errors(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("grpo", "sc"), steps=12)
    experiment = read_experiment(folder)
    found = paired(experiment.of("grpo"), experiment.of("sc"))
    page = render(experiment, {"grpo": "", "sc": ""}, folder)
    assert f"{found.difference:+.3f} ± {found.half_width:.3f}" in page
    assert f"differences of {found.detectable:.3f} would have been found" in power([found])
    assert escape(power([found])) in page
    low, high = binomial_interval(experiment.of("sc")[0].metrics["val_reward_mean"][7], 50)
    assert f"{low:.3f} to {high:.3f}" in page
    alone = render(read_experiment(folder, ["sc"]), {"sc": ""}, folder)
    assert "No arm can be compared with an uncorrected one" in alone


def test_roles_and_pairs_are_read_from_what_a_trainer_writes(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("grpo_bf16", "grpo", "sc"), steps=12)
    for path in folder.glob("runs/*/seed0/run.json"):
        content = json.loads(path.read_text())
        content["identity"]["config"] = TrainStage.of(
            load_settings([CONFIG], [], content["identity"]["arm"])
        ).identity()
        path.write_text(json.dumps(content))
    experiment = read_experiment(folder, control="grpo_bf16")
    assert control_of(experiment, experiment) == "grpo_bf16" and uncorrected(experiment) == "grpo"
    assert paired(experiment.of("grpo"), experiment.of("sc")).values == 10
    assert "Each arm less GRPO" in render(experiment, dict.fromkeys(experiment.arms, ""), folder)
