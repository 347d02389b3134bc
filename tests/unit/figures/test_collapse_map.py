"""The map of the collapse from invented runs: outcomes, verdicts, conditions taken away, the law, figure and page."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from score_centering.figures import collapse_study
from score_centering.figures.canvas import drawing, save
from score_centering.figures.collapse_map import LOOKS, draw_map
from score_centering.figures.collapse_study import (
    RUNS,
    WORDS,
    by_level,
    collapse_table,
    conditions_taken_away,
    map_law,
    page,
    verdicts,
)
from score_centering.settings import UserError
from score_centering.settings.load import parse
from score_centering.settings.stages import CollapseStage

ROOT = Path(__file__).parents[3]
STAGE = {
    "grid": {"precisions": ["bf16", "noise"], "rates": [1.0, 1.5], "entropies": ["own"], "bounds": ["none", "clip"]},
    "control": "bf16",
    "reference": {"precision": "noise", "rate": 1.5, "entropy": "own", "bound": "none"},
    "arms": ["pg", "sc"],
    "seeds": [0, 1, 2],
}
AXES = ["precision", "rate", "entropy", "bound"]


@pytest.fixture
def stage():
    return parse(CollapseStage, STAGE)


def judged(ends: dict, stage: CollapseStage) -> pd.DataFrame:
    """Runs by (precision, rate, bound, arm) → the last reward of each seed; each run's peak and best are 0.6."""
    rows = [
        {"precision": p, "rate": rate, "entropy": "own", "bound": bound, "arm": arm, "seed": seed, "reward_last": last,
         "reward_peak": 0.6, "reward_best": 0.6}
        for (p, rate, bound, arm), lasts in ends.items()
        for seed, last in enumerate(lasts)
    ]  # fmt: skip
    return collapse_study._judged(pd.DataFrame(rows), stage)


GOOD, LOW, DEAD = 0.6, 0.4, 0.04
ENDS = {
    ("bf16", 1.0, "none", "pg"): [GOOD] * 3,
    ("bf16", 1.0, "none", "sc"): [GOOD] * 3,
    ("noise", 1.0, "none", "pg"): [DEAD, DEAD, GOOD],
    ("noise", 1.0, "none", "sc"): [GOOD, GOOD, LOW],
    ("bf16", 1.5, "none", "pg"): [GOOD, LOW, LOW],
    ("noise", 1.5, "none", "pg"): [DEAD] * 3,
    ("noise", 1.5, "none", "sc"): [GOOD] * 3,
    ("bf16", 1.0, "clip", "pg"): [GOOD] * 3,
    ("noise", 1.0, "clip", "pg"): [LOW, LOW, DEAD],
    ("noise", 1.0, "clip", "sc"): [GOOD] * 3,
    ("bf16", 1.5, "clip", "pg"): [GOOD] * 3,
    ("noise", 1.5, "clip", "pg"): [DEAD, DEAD, DEAD],
    ("noise", 1.5, "clip", "sc"): [LOW, LOW, GOOD],
}


def test_outcomes_and_the_control_by_hand(stage):
    runs = judged(ENDS, stage)
    own = runs.set_index([*AXES, "arm", "seed"]).sort_index()
    assert own.loc[("noise", 1.0, "own", "none", "pg")]["outcome"].tolist() == ["lost", "lost", "held"]
    assert own.loc[("noise", 1.0, "own", "clip", "pg")]["outcome"].tolist() == ["lowered", "lowered", "lost"]
    # Held against the same rate and bound, of the same seed: 0.4 of a control that ended at 0.4 is held.
    fallen = own.loc[("noise", 1.5, "own", "none", "sc")]
    assert fallen["control_last"].tolist() == [GOOD, LOW, LOW]
    assert fallen["control_healthy"].tolist() == [True, False, False]


def test_a_run_without_its_control_is_not_judged(stage):
    runs = judged({key: ends for key, ends in ENDS.items() if key != ("bf16", 1.0, "clip", "pg")}, stage)
    lonely = runs[(runs["bound"] == "clip") & (runs["rate"] == 1.0)]
    assert lonely["outcome"].isna().all() and lonely["control_healthy"].isna().all() and len(lonely) == 6
    cells = verdicts(runs, stage.arms)
    assert not ((cells["bound"] == "clip") & (cells["rate"] == 1.0)).any()


def test_verdicts_by_hand(stage):
    cells = verdicts(judged(ENDS, stage), stage.arms).set_index(AXES)
    assert cells["verdict"].to_dict() == {
        ("bf16", 1.0, "own", "none"): "nothing",
        ("noise", 1.0, "own", "none"): "saved",
        ("noise", 1.5, "own", "none"): "unstable",
        ("noise", 1.0, "own", "clip"): "helped",
        ("noise", 1.5, "own", "clip"): "both",
    }
    saved = cells.loc[("noise", 1.0, "own", "none")]
    assert (saved["uncorrected_lost"], saved["uncorrected_held"], saved["uncorrected_runs"]) == (2, 1, 3)
    assert (saved["corrected_lost"], saved["corrected_held"]) == (0, 2)
    assert saved["uncorrected_last"] == pytest.approx((2 * DEAD + GOOD) / 3)


@pytest.mark.parametrize(
    ("uncorrected", "corrected", "verdict"),
    [
        ([GOOD, GOOD], [GOOD, GOOD], "nothing"),
        ([GOOD, GOOD], [DEAD, LOW], "costs"),
        ([DEAD, GOOD], [GOOD, GOOD], "helped"),
    ],
)
def test_a_half_is_no_majority(stage, uncorrected, corrected, verdict):
    ends = {("bf16", 1.0, "none", "pg"): [GOOD] * 2, ("noise", 1.0, "none", "pg"): uncorrected}
    (cell,) = verdicts(judged(ends | {("noise", 1.0, "none", "sc"): corrected}, stage), stage.arms).to_dict("records")
    assert cell["verdict"] == verdict


def test_conditions_taken_away_by_hand(stage):
    table = conditions_taken_away(judged(ENDS, stage), stage)
    assert table["condition"].tolist() == ["every condition", "precision bf16", "rate 1", "bound clip"]
    assert table["pg lost"].tolist() == ["3 of 3", "0 of 3", "2 of 3", "3 of 3"]
    assert table["sc lost"].tolist() == ["0 of 3", "–", "0 of 3", "0 of 3"]
    assert table["pg ends"].tolist() == ["0.04", "0.47", "0.23", "0.04"]


def test_levels_over_the_whole_map_leave_the_control_s_precision_out(stage):
    table = by_level(judged(ENDS, stage), stage).set_index("condition")
    assert table.loc["precision noise", "pg lost"] == "9 of 12" and "precision bf16" not in table.index
    assert table.loc["rate 1", "pg lost"] == "3 of 6" and table.loc["bound clip", "sc lost"] == "0 of 6"


def whole(ends: dict, stage: CollapseStage, **early) -> pa.Table:
    """The invented runs as a table of the study; those that are dead began with a K3 of 0.3, others with 0.01."""
    runs = judged(ends, stage)
    runs = runs.assign(steps=40, **{name: np.nan for name in RUNS.names if name.startswith("early_")})
    runs["early_k3_kl"] = np.where(runs["reward_last"] == DEAD, 0.3, 0.01)
    for name, value in early.items():
        runs[name] = value
    return pa.Table.from_pandas(runs, schema=RUNS, preserve_index=False)


def test_the_law_takes_the_features_that_every_run_has(stage):
    found, alone = map_law(whole(ENDS, stage, early_entropy=1.0).to_pandas(), stage)
    assert set(alone) == {"rate", "early_k3_kl", "early_entropy"} == set(found.weights)
    assert alone["early_k3_kl"] == 1 and alone["early_entropy"] == 0.5
    # Nine of twelve uncorrected runs are lost: six at 1.5, three at 1; the three others are all at 1.
    assert alone["rate"] == pytest.approx((6 + 3 / 2) / 9)
    assert found.fitted_runs + found.other_runs == 12


def test_without_two_of_either_kind_there_is_no_law(stage):
    ends = {key: [GOOD] * 3 for key in ENDS} | {("noise", 1.0, "none", "pg"): [DEAD, GOOD, GOOD]}
    table = whole(ends, stage)
    assert map_law(table.to_pandas(), stage) is None
    assert "no law can be fitted" in page(table, stage)
    assert "no uncorrected run is lost: there is nothing to take away" in page(table, stage)


def test_the_page_by_hand(stage):
    text = page(whole(ENDS, stage), stage)
    assert text.startswith("# Where training collapses\n\n39 runs.")
    for line in (
        "- uncorrected is lost, sc holds: 1 of 5 cells",
        "- the control itself falls, or earns nothing: 1 of 5 cells",
        "With every condition 3 of 3 uncorrected runs are lost. Fewest, 0 of 3, with this in the place of one of them: "
        "precision bf16.",
        "| bound clip | 3 of 3 | 0 of 3 | 0.04 | 0.47 |",
    ):
        assert line in text, line
    assert "area under the curve" in text and "| early_k3_kl | +" in text


def test_the_figure_shows_each_cell_s_verdict_and_is_the_same_bytes_twice(stage, tmp_path):
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        with drawing():
            figure = draw_map(whole(ENDS, stage), stage)
            files.append(save(figure, folder / "collapse"))
    (axes,) = figure.axes
    marks = {(round(text.get_position()[0]), round(text.get_position()[1])): text.get_text()
             for text in axes.texts if text.get_text() in {mark for _, mark in LOOKS.values()}}  # fmt: skip
    # Columns: bf16 at 1 and 1.5, noise at 1 and 1.5; rows: no bound, clip.
    assert marks == {(0, 0): "·", (2, 0): "S", (3, 0): "~", (2, 1): "s", (3, 1): "×"}
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["none", "clip"]
    assert "0.23 | 0.53" in [text.get_text() for text in axes.texts]
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_large_map_has_letters_only():
    wide = parse(CollapseStage, STAGE | {"grid": STAGE["grid"] | {"rates": [1.0, 1.5, 2.0, 3.0, 4.0]}})
    with drawing():
        figure = draw_map(whole(ENDS, wide), wide)
    assert not any("|" in text.get_text() for text in figure.axes[0].texts)
    assert LOOKS.keys() == WORDS.keys()


def grid_runs(synthetic, folder: Path) -> Path:
    """Three cells with two arms and one seed, below `folder` as the workflow has them."""
    for cell in ("bf16+1+own+none", "noise+1+own+none", "noise+9+own+none"):
        for arm in ("pg", "sc"):
            run = synthetic.write_run(folder / "made" / cell, arm, 0, 40)
            moved = folder / "runs" / cell / arm / "seed0"
            moved.parent.mkdir(parents=True)
            run.rename(moved)
    return folder / "runs"


def test_the_table_reads_what_has_finished_of_the_grid_alone(synthetic, stage, tmp_path):
    folder = grid_runs(synthetic, tmp_path)
    table = collapse_table(stage, folder)
    assert table.schema.equals(RUNS)
    assert table.select(["precision", "rate", "bound", "arm", "seed", "steps"]).to_pylist() == [
        {"precision": precision, "rate": 1.0, "bound": "none", "arm": arm, "seed": 0, "steps": 40}
        for precision in ("bf16", "noise")
        for arm in ("pg", "sc")
    ]
    metrics = pq.read_table(folder / "noise+1+own+none" / "sc" / "seed0" / "metrics.parquet").to_pandas()
    row = table.to_pylist()[3]
    updates = metrics[metrics["step"] > 0]
    assert row["reward_last"] == pytest.approx(updates["reward_mean"].tail(20).mean())
    assert row["early_k3_kl"] == pytest.approx(updates["k3_kl"].head(5).mean())
    assert row["control_last"] == table.to_pylist()[0]["reward_last"]
    with pytest.raises(UserError, match="holds no run of the grid"):
        collapse_table(stage, tmp_path / "made")


def test_the_program(synthetic, tmp_path):
    folder = grid_runs(synthetic, tmp_path)
    program = str(ROOT / "workflow/scripts/collapse.py")
    start = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({program!r}, run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", start, "--runs", str(folder), "--output", str(tmp_path / "map")]
    finished = subprocess.run([*command, "--settings", json.dumps(STAGE)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == {f"map.{kind}" for kind in ("png", "svg", "pdf", "parquet", "md")}
    assert finished.stdout == (tmp_path / "map.md").read_text()
