"""docs/results/collapse: the figures are drawn from the tables beside them, and the page's counts are the tables'."""

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FOLDER = Path(__file__).parents[3] / "docs/results/collapse"


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(FOLDER / "draw.py"))


def test_lost_is_below_a_quarter_of_the_own_peak_and_of_the_control(program):
    runs = pd.DataFrame({"reward_last": [0.04, 0.04, 0.14, 0.2], "reward_peak": [0.4, 0.1, 0.5, 0.9]})
    assert program["lost"](runs).tolist() == [True, False, False, False]
    assert program["dead"](runs).tolist() == [True, True, True, False]


def test_area_under_the_curve_by_hand(program):
    # Three of the four pairs of a dying and a living run are in order.
    assert program["area"](np.array([0.9, 0.4, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0])) == 0.75
    assert program["area"](np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0.5


def test_the_page_states_what_the_tables_hold(program):
    page = " ".join((FOLDER / "README.md").read_text().split())
    runs = pd.read_parquet(FOLDER / "runs.parquet")
    cells = runs.groupby(program["CELL"], dropna=False)["seed"].nunique()
    assert f"{len(runs)} runs" in page and f"{len(cells)} cells, {(cells >= 3).sum()} with at least three seeds" in page
    plain = runs[(runs["optimizer"] == "sgd") & ~runs["fresh_noise"] & runs["lr"].between(0.75, 1.5)]
    noisy = plain[plain["sampler"].isin(["noise 0.2", "noise 0.3"])]
    dead = program["dead"]
    uncorrected, centred = (noisy[noisy["arm"] == arm] for arm in ("pg", "sc"))
    assert f"{dead(uncorrected).sum()} of {len(uncorrected)} uncorrected runs" in page
    assert dead(centred).sum() == 0 and f"none of {len(centred)} with score centering" in page
    control = plain[(plain["sampler"] == "BF16") & (plain["arm"] == "pg")]
    bare = control[control["grad_clip"].isna()]
    assert f"{dead(bare).sum()} of {len(bare)} controls die" in page
    fitted, other, _, count = program["law"](runs)
    assert f"{other:.2f} ({count} runs; {fitted:.2f} on the fitted half)" in page


def test_the_figures_are_drawn(program, tmp_path, capsys):
    program["main"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"endings.png", "curves.png"}
    assert "law: area under the curve" in capsys.readouterr().out
