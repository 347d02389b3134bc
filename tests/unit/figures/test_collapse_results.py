"""docs/results/collapse: the figures are drawn from the tables beside them, and the page's counts are the tables'."""

import runpy
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from score_centering.settings.dotted import deep_merge
from score_centering.settings.load import interpolate, load_settings, read_yaml, resolve
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import cell_stage

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/results/collapse"


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(FOLDER / "draw.py"))


def test_lost_is_below_a_quarter_of_the_own_peak_and_of_the_control(program):
    runs = pd.DataFrame({"reward_last": [0.04, 0.04, 0.14, 0.2], "reward_peak": [0.4, 0.1, 0.5, 0.9]})
    assert program["lost"](runs).tolist() == [True, False, False, False]
    assert program["dead"](runs).tolist() == [True, True, True, False]


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
    told = program["forecast"](runs)
    assert f"{told.other:.2f} ({told.other_runs} runs; {told.fitted:.2f} on the fitted half)" in page


def test_one_condition_taken_away(program):
    page = (FOLDER / "README.md").read_text()
    table = program["taken_away"](pd.read_parquet(FOLDER / "runs.parquet"))
    assert all("| " + " | ".join(row) + " |" in page for row in table.itertuples(index=False))


def test_taken_away_by_hand(program):
    every = {"arm": "pg", "sampler": "noise 0.3", "optimizer": "sgd", "lr": 1.0, "schedule": "constant", "prompts": 64,
             "n": 8, "filler": 0.6, "grad_clip": 0.3, "fresh_noise": False, "reward_last": 0.05}  # fmt: skip
    changed = [{}, {"reward_last": 0.5}, {"arm": "sc"}, {"grad_clip": np.nan}, {"sampler": "BF16"}, {"lr": 2.0}]
    table = program["taken_away"](pd.DataFrame([every | other for other in changed])).set_index("condition")
    assert table.loc["every condition"].tolist() == ["1 of 2", "1 of 1", "0.28", "0.05"]
    assert table.loc["no gradient clip"].tolist() == ["1 of 1", "–", "0.05", "–"]
    assert table.loc["BF16", "uncorrected dead"] == "1 of 1"
    assert table.loc["rate of 0.6", "uncorrected dead"] == "–"


def test_the_figures_are_drawn(program, tmp_path, capsys):
    program["main"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"endings.png", "curves.png"}
    assert "law: area under the curve" in capsys.readouterr().out


@pytest.fixture(scope="module")
def confirmation():
    return runpy.run_path(str(FOLDER / "confirm.py"))


def run(attempt, arm, seed, rewards, clean=0.3):
    steps = range(len(rewards) + 1)
    return pd.DataFrame(
        {
            "attempt": attempt,
            "arm": arm,
            "seed": seed,
            "step": steps,
            "reward_mean": [np.nan, *rewards],
            "clean_reward_mean": [clean, *[np.nan] * len(rewards)],
        }
    )


def test_lost_and_held_by_hand(confirmation):
    """A run that fell at once from 0.1: not lost by its own peak, lost by the warm-started model's 0.3."""
    control, fell, kept = [0.6] * 40, [0.1] * 20 + [0.04] * 20, [0.6] * 20 + [0.57] * 20
    rows = pd.concat(
        run(attempt, arm, 1, rewards)
        for attempt in ("first", "third")
        for arm, rewards in (("grpo_bf16", control), ("grpo", fell), ("sc", kept))
    )
    table = confirmation["verdicts"](rows).set_index(["attempt", "arm"])
    assert not table.loc[("first", "grpo"), "lost"] and table.loc[("third", "grpo"), "lost"]
    assert table.loc[("first", "grpo"), "peak"] == pytest.approx(0.1)
    assert table.loc[("first", "grpo"), "last"] == pytest.approx(0.04)
    assert table.loc[("third", "sc"), ["held", "healthy"]].all() and not table.loc[("third", "sc"), "lost"]
    assert confirmation["pairs"](table.reset_index()) == (2, 2)


def test_the_confirmation_is_drawn(confirmation, tmp_path, capsys):
    """Both figures; and the counts that the pages state are those of the tables."""
    confirmation["main"](tmp_path, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"confirm.png", "stale.png"}
    printed = capsys.readouterr().out
    assert "sc above grpo of the same seed: 20 of 20" in printed
    rows = pd.read_parquet(FOLDER / "confirm.parquet")
    counts = confirmation["summary"](confirmation["verdicts"](rows[rows["attempt"].isin(confirmation["ATTEMPTS"])]))
    page = " ".join((FOLDER / "README.md").read_text().split())
    lost = [f"{row['lost']:.0f} of {row['runs']:.0f}" for _, row in counts.xs("grpo", level="arm").iterrows()]
    assert f"| GRPO lost | {' | '.join(lost)} |" in page
    centred = counts.xs("sc", level="arm")
    held = [f"{row['held']:.0f} of {row['runs']:.0f} ({row['lost']:.0f})" for _, row in centred.iterrows()]
    assert f"| SC held (lost) | {' | '.join(held)} |" in page
    masked = counts.xs("grpo_mis", level="arm")
    means = [f"{row['last']:.2f} ({row['low']:.2f}–{row['high']:.2f})" for _, row in masked.iterrows()]
    assert f"| GRPO + MIS | {' | '.join(means)} |" in page
    stale = confirmation["stale"](rows).groupby("arm")[["dead", "holds"]].sum()
    order = ["grpo", "sc", "grpo_tis", "sc_tis", "grpo_mis", "sc_mis"]
    verdicts = [f"{stale.loc[arm, 'dead']} / {stale.loc[arm, 'holds']}" for arm in order]
    assert f"of 5 | {' | '.join(verdicts)} |" in (FOLDER.parent / "stale/README.md").read_text()


def test_the_meter_adds_nothing_to_the_first_updates(confirmation):
    """The page's areas: 0.74 without and 0.71 with the meter over all arms; no law for the uncorrected alone."""
    table = confirmation["early_law"](pd.read_parquet(confirmation["TABLE"])).round(2)
    assert table["other"].tolist() == [0.74, 0.71, 0.26, 0.30]
    assert (table["fitted_runs"] + table["other_runs"]).tolist() == [141, 141, 38, 38]


def test_the_second_list(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["second.py", "explore"])
    runpy.run_path(str(FOLDER / "second.py"), run_name="__main__")
    assert capsys.readouterr().out == (FOLDER / "second.list").read_text()


def test_the_second_choice_by_hand(tmp_path, capsys):
    """Most dead uncorrected runs among candidates whose centred runs keep up: b, though d kills more."""
    second = runpy.run_path(str(FOLDER / "second.py"))
    ends = {"b": (0.04, 0.6), "d": (0.04, 0.4)}
    for name in second["CANDIDATES"]:
        grpo, sc = ends.get(name, (0.5, 0.6))
        for arm, seeds in second["EXPLORED"].items():
            last = {"grpo_bf16": 0.6, "grpo": grpo, "sc": sc}[arm]
            for seed in seeds:
                folder = tmp_path / f"{name}-{arm}-s{seed}"
                folder.mkdir()
                pd.DataFrame({"reward_mean": [0.5] * 20 + [last] * 20}).to_parquet(folder / "metrics.parquet")
    assert second["choose"](tmp_path) == "b"
    assert "d: control 0.600, grpo 0.040 0.040 0.040 (3 dead), sc keeps 0.667" in capsys.readouterr().err


def test_the_list_of_stale_runs_is_the_workflow_s():
    files = [ROOT / "config" / name for name in ("config.yaml", "collapse.yaml", "collapse_stale.yaml")]
    config = interpolate(reduce(deep_merge, map(read_yaml, files)))
    settings = resolve(config)
    for line in (FOLDER.parent / "stale/confirm.list").read_text().splitlines():
        name, arm, seed, *words = line.split()
        assert name == f"{arm}-s{seed}" and int(seed) in settings.stale.seeds and arm in settings.stale.arms
        assert words[:2] == ["--configfile", "config/collapse.yaml"]
        by_hand = TrainStage.of(load_settings([str(file) for file in files[:2]], words[2:], arm))
        assert by_hand == cell_stage(config, settings, "stale", "sync32", arm), name
