import numpy as np
import pyarrow.parquet as pq
import pytest

from score_centering.figures.experiment import read_experiment
from score_centering.figures.series import WINDOW
from score_centering.figures.summary import SUMMARY, summarise, write_summary
from score_centering.settings import UserError


def summary_of(synthetic, folder, rewards, k3=None, **changes):
    steps = len(rewards)
    changes = {"reward_mean": rewards, "k3_kl": k3 or [0.0] * steps, **changes}
    synthetic.write_run(folder, "sc", 0, steps, changes)
    return summarise(read_experiment(folder)).to_pylist()[0]


def test_a_collapse_by_hand(synthetic, tmp_path):
    rewards = [0.2] * 10 + [0.8] * 10 + [0.04] * 20
    row = summary_of(synthetic, tmp_path / "e", rewards, [0.5] * 30 + [1.0] * 9 + [2.0], truncated_share=[0.25] * 40)
    assert WINDOW == 10
    assert row["reward_first"] == pytest.approx(0.2)
    assert row["reward_last"] == pytest.approx(0.04)
    assert (row["reward_peak"], row["reward_peak_step"]) == (pytest.approx(0.8), 20)
    assert row["reward_share_kept"] == pytest.approx(0.05)
    assert row["collapse_step"] == 30  # the mean over steps 20 to 29 is still 0.116
    assert (row["k3_kl_max"], row["k3_kl_final"]) == (2.0, pytest.approx(1.1))
    assert row["truncated_share"] == 0.25
    assert row["steps"] == 40


def test_a_lucky_step_is_no_peak(synthetic, tmp_path):
    row = summary_of(synthetic, tmp_path / "e", [1.0] + [0.4] * 19)
    assert row["reward_peak"] == pytest.approx(0.46)
    assert row["collapse_step"] is None


def test_reward_that_is_always_zero(synthetic, tmp_path):
    row = summary_of(synthetic, tmp_path / "e", [0.0] * 12)
    assert row["reward_share_kept"] is None and row["collapse_step"] is None


def test_a_run_shorter_than_the_window_and_nothing_measured(synthetic, tmp_path):
    row = summary_of(synthetic, tmp_path / "e", [0.1, None, 0.3], [None, None, None])
    assert row["reward_first"] == row["reward_last"] == row["reward_peak"] == pytest.approx(0.2)
    assert row["k3_kl_max"] is None and row["k3_kl_final"] is None and row["val_reward_last"] is None
    assert summary_of(synthetic, tmp_path / "f", [None, None])["reward_peak"] is None


def test_files(tiny, tmp_path):
    table = summarise(read_experiment(tiny))
    first = [path.read_bytes() for path in write_summary(table, tmp_path / "a")]
    assert first == [path.read_bytes() for path in write_summary(table, tmp_path / "b")]
    read = pq.read_table(tmp_path / "a" / "summary.parquet")
    assert read.schema.names == SUMMARY.names
    assert read["arm"].to_pylist() == ["grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis"]
    assert all(field.metadata[b"definition"] for field in read.schema)
    assert read.schema.metadata[b"experiment"] == b"tiny" and read.schema.metadata[b"window"] == b"10"
    text = (tmp_path / "a" / "summary.md").read_text(encoding="utf-8")
    assert "nan" not in text.lower() and "None" not in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {len(SUMMARY) + 1}


@pytest.mark.parametrize("name", ["metrics.parquet", "timing.parquet"])
def test_a_missing_file_is_named(synthetic, tmp_path, name):
    folder = synthetic.write_experiment(tmp_path / "e", ("grpo", "sc"), steps=3)
    (folder / "runs" / "sc" / "seed0" / name).unlink()
    with pytest.raises(UserError, match=rf"runs/sc/seed0/{name}: missing; arm sc, seed 0"):
        read_experiment(folder)
    assert read_experiment(folder, ["grpo"]).arms == ["grpo"]


def test_missing_arms_seeds_and_folders_are_named(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("sc",), steps=3)
    with pytest.raises(UserError, match=r"runs/sc_tis/seed0/metrics.parquet: missing"):
        read_experiment(folder, ["sc_tis"], [0])
    with pytest.raises(UserError, match=r"runs/sc_tis: this arm has no run"):
        read_experiment(folder, ["sc_tis"])
    with pytest.raises(UserError, match=r"seed7/metrics.parquet: missing"):
        read_experiment(folder, seeds=[0, 7])
    with pytest.raises(UserError, match=r"nowhere/runs: no such folder"):
        read_experiment(tmp_path / "nowhere")
    (folder / "runs" / "grpo").mkdir()
    with pytest.raises(UserError, match=r"runs/grpo: holds no seed<k> folder"):
        read_experiment(folder)


def test_a_copied_run_is_not_another_arm(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("sc",), steps=3)
    (folder / "runs" / "sc").rename(folder / "runs" / "sc_mis")
    with pytest.raises(UserError, match=r"sc_mis/seed0/metrics.parquet: was written by arm sc, seed 0"):
        read_experiment(folder)


def test_missing_values_become_nan(tiny):
    run = read_experiment(tiny, ["grpo"]).runs[0]
    assert np.isnan(run.metrics["head_mass_sampler"]).all()
    assert run.steps.tolist() == list(range(1, 41))
