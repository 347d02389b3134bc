import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from score_centering.figures.canvas import drawing
from score_centering.figures.compare import OVERLAYS, common_arms, control_of, diff, overlay, table
from score_centering.figures.experiment import read_experiment
from score_centering.settings import UserError

PROGRAM = Path(__file__).parents[3] / "workflow" / "scripts" / "compare.py"


@pytest.fixture(scope="module")
def pair(synthetic, tmp_path_factory):
    """`b` has one arm less than `a`, one that `a` lacks, and other settings."""
    folder = tmp_path_factory.mktemp("pair")
    synthetic.write_experiment(folder / "a", ("grpo", "sc", "sc_tis"), steps=12)
    synthetic.write_experiment(folder / "b", ("grpo", "sc", "mine"), steps=15)
    for arm, change in (("grpo", {"seed": 43}), ("sc", {"seed": 43, "score_centering": {"centering": False}})):
        path = folder / "b" / "runs" / arm / "seed0" / "run.json"
        content = json.loads(path.read_text())
        content["identity"]["config"] |= change
        content["identity"]["dataset_manifest_sha256"] = "0" * 64
        path.write_text(json.dumps(content))
    return folder / "a", folder / "b"


def test_settings_that_differ(pair):
    first, second = map(read_experiment, pair)
    assert diff(first, second) == "\n".join(
        [
            "--- a",
            "+++ b",
            "@@ dataset_manifest_sha256 @@",
            f'-"{"d" * 64}"',
            f'+"{"0" * 64}"',
            "@@ score_centering.centering (sc) @@",
            "-true",
            "+false",
            "@@ score_centering.is_mode (sc) @@",
            '-"none"',
            "+(absent)",
            "@@ seed @@",
            "-42",
            "+43",
            "",
        ]
    )
    assert diff(first, first).endswith("no setting differs\n")


def test_table_has_every_arm_of_either(pair):
    rows = [line.split(" | ") for line in table(*map(read_experiment, pair)).splitlines()]
    assert [row[0].strip("| ") for row in rows[2:]] == ["GRPO", "SC", "SC + TIS", "mine"]
    assert {len(row) for row in (rows[0], *rows[2:])} == {10}
    assert re.fullmatch(r"[+-]0\.\d{3}", rows[2][-2]) and rows[4][-2] == rows[5][-2] == "–"
    assert {row[-1] for row in rows[2:]} == {"– |"}  # another order of problems: no pairs


def test_overlay_has_a_panel_per_common_arm(pair):
    first, second = map(read_experiment, pair)
    with drawing():
        for column, label, log in OVERLAYS.values():
            figure = overlay(first, second, column, label, log)
            assert [axes.get_title(loc="left") for axes in figure.axes] == ["GRPO", "SC"]
            assert [len(axes.lines) for axes in figure.axes] == [2, 2]
            colours = [line.get_color() for line in figure.axes[0].lines]
            assert colours == [handle.get_color() for handle in figure.legends[0].legend_handles]
            assert len(set(colours)) == 2


def test_rewards_of_unequal_lengths_are_compared_at_the_last_common_step(synthetic, tmp_path):
    long = [0.2] * 15 + [0.4] * 10 + [0.9] * 35
    synthetic.write_run(tmp_path / "a", "sc", 0, 60, {"reward_mean": long})
    synthetic.write_run(tmp_path / "b", "sc", 0, 25, {"reward_mean": [0.2] * 15 + [0.5] * 10})
    (row,) = table(read_experiment(tmp_path / "a"), read_experiment(tmp_path / "b")).splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:5] == ["SC", "25", "0.400", "0.500"] and cells[-3:-1] == ["+0.100", "+0.100 ± 0.000"]


def test_the_control_is_known_by_its_settings(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("grpo", "mine"), steps=3)
    experiment = read_experiment(folder)
    assert control_of(experiment, experiment) is None
    path = folder / "runs/mine/seed0/run.json"
    content = json.loads(path.read_text())
    rollout = {"quantization": None, "engine_kwargs": {"vllm": {"kv_cache_dtype": "auto"}}}
    content["identity"]["config"]["actor_rollout_ref"]["rollout"] = rollout
    path.write_text(json.dumps(content))
    assert control_of(experiment, experiment) == "mine" and common_arms(experiment, experiment) == ["mine", "grpo"]
    content["identity"]["config"]["perturbation"] = {"weight_noise": 0.3}
    path.write_text(json.dumps(content))
    assert control_of(experiment, experiment) is None


def test_nothing_in_common(pair, synthetic, tmp_path):
    other = synthetic.write_experiment(tmp_path / "c", ("grpo_mis",), steps=3)
    with pytest.raises(UserError, match=r"no arm in common: .*a has grpo, sc, sc_tis, .*c has grpo_mis"):
        common_arms(read_experiment(pair[0]), read_experiment(other))


def test_program(pair, tmp_path):
    first = shutil.copytree(pair[0], tmp_path / "a")
    command = [sys.executable, "-W", "error", str(PROGRAM), str(first), str(pair[1])]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    page = (first / "comparisons" / "b" / "comparison.md").read_text(encoding="utf-8")
    assert "+43" in page and "| GRPO |" in page
    assert all((first / "comparisons" / "b" / name).is_file() for name in re.findall(r"\((\w+\.svg)\)", page))
