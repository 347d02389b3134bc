import numpy as np
import pytest

from score_centering.figures.experiment import read_experiment
from score_centering.figures.verdict import clearly_above, join, outcome, standard_error, verdict

NOISE = [0.01, -0.01] * 10
RISES = [0.3 + noise for noise in NOISE[:10]] + [0.7 + noise for noise in NOISE[:10]]
FALLS = [0.6 + noise for noise in NOISE[:10]] + [0.0] * 10


def judge(synthetic, tmp_path, *runs, control="grpo_bf16"):
    """`runs`: (arm, seed, rewards)."""
    for arm, seed, rewards in runs:
        synthetic.write_run(tmp_path / "e", arm, seed, len(rewards), {"reward_mean": rewards})
    found = verdict(read_experiment(tmp_path / "e", control=control))
    return found.headline.replace("\N{NO-BREAK SPACE}", " "), " ".join(found.notes).replace("\N{NO-BREAK SPACE}", " ")


def test_collapse(synthetic, tmp_path):
    headline, notes = judge(synthetic, tmp_path, ("grpo_bf16", 0, RISES), ("grpo", 0, FALLS), ("sc", 0, RISES))
    assert headline == (
        "With INT8 + INT4 KV rollouts, GRPO (0 % of its peak reward kept) collapsed, while SC was still rising at the "
        "end."
    )
    assert "The BF16 control learned: its mean reward went from 0.30 over the first 10 steps to 0.70" in notes
    assert "SC ended highest, at a mean reward of 0.70." in notes
    assert "One seed can't show how often" in notes


def test_the_control_is_found_by_its_role(synthetic, tmp_path):
    runs = ("exact", 0, RISES), ("grpo_bf16", 0, FALLS)
    headline, notes = judge(synthetic, tmp_path / "with", *runs, control="exact")
    assert "GRPO, BF16 rollouts (0 % of its peak reward kept) collapsed" in headline
    assert "The BF16 control learned" in notes
    headline, notes = judge(synthetic, tmp_path / "without", *runs, control=None)
    assert "exact was still rising at the end" in headline and "control" not in notes
    assert headline.startswith("With BF16 and INT8 + INT4 KV rollouts, "), "each arm's own precision"


def test_no_collapse_and_level(synthetic, tmp_path):
    headline, notes = judge(synthetic, tmp_path, ("grpo", 0, RISES), ("sc", 0, [r + 0.001 for r in RISES]))
    assert headline == "With INT8 + INT4 KV rollouts, no arm collapsed: all 2 arms were still rising at the end."
    assert "All ended level within noise, at mean rewards of 0.70 to 0.70." in notes


def test_faded(synthetic, tmp_path):
    fades = [0.8] * 10 + [0.6] * 10
    headline, _ = judge(synthetic, tmp_path, ("grpo", 0, fades), ("sc", 0, RISES))
    assert headline == (
        "With INT8 + INT4 KV rollouts, GRPO (75 % of its peak reward kept) faded, while SC was still rising at the end."
    )


def test_what_is_kept_is_rounded_down(synthetic, tmp_path):
    levels = [0.3] * 10 + [0.8] * 10 + [0.7984] * 10  # 99.8 % of the peak
    headline, _ = judge(synthetic, tmp_path, ("grpo", 0, levels), ("sc", 0, [0.3] * 20 + [0.7] * 10))
    assert headline == (
        "With INT8 + INT4 KV rollouts, no arm collapsed: SC was still rising at the end and GRPO kept at least 99 % of "
        "the "
        "peak reward."
    )


def test_a_flat_reward_is_not_rising(synthetic, tmp_path):
    headline, _ = judge(synthetic, tmp_path, ("sc", 0, [0.5] * 20))
    assert headline == "With INT8 + INT4 KV rollouts, no arm collapsed: SC kept at least 100 % of the peak reward."


def test_where_no_rollout_was_low_the_headline_says_so(synthetic, tmp_path):
    headline, _ = judge(synthetic, tmp_path, ("grpo_bf16", 0, FALLS), control=None)
    assert headline == "With BF16 rollouts, GRPO, BF16 rollouts (0 % of its peak reward kept) collapsed."


def test_a_control_that_did_not_learn_gives_no_verdict(synthetic, tmp_path):
    headline, _ = judge(synthetic, tmp_path, ("grpo_bf16", 0, [0.3 + noise for noise in NOISE]), ("grpo", 0, FALLS))
    assert headline.startswith("No verdict: the BF16 control itself did not learn")


def test_reward_that_is_always_zero(synthetic, tmp_path):
    headline, _ = judge(synthetic, tmp_path, ("grpo", 0, [0.0] * 20))
    assert headline == "With INT8 + INT4 KV rollouts, GRPO (0 % of its peak reward kept) collapsed."


def test_only_the_control(synthetic, tmp_path):
    assert judge(synthetic, tmp_path, ("grpo_bf16", 0, RISES))[0] == "No verdict: only the BF16 control was run."


def test_seeds_set_the_noise(synthetic, tmp_path):
    runs = [("sc", seed, [0.3] * 10 + [0.7 + shift] * 10) for seed, shift in enumerate((-0.1, 0.0, 0.1))]
    _, notes = judge(synthetic, tmp_path, *runs)
    assert "3 seeds per arm" in notes and "at most ±0.12" in notes  # 2 · 0.1 / √3


def test_arithmetic():
    assert standard_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 / np.sqrt(3))
    assert standard_error(np.array([1.0])) == 0.0
    assert clearly_above(1.0, 0.4, 0.2, 0.2) and not clearly_above(1.0, 0.5, 0.2, 0.2)
    assert join(["a"]) == "a" and join(["a", "b", "c"]) == "a, b and c"


def test_noise_is_that_of_the_first_and_of_the_last_ten_steps(synthetic, tmp_path):
    """Errors of one seed by hand: ±a in turn has a standard deviation of a·√(10/9), over √10: a/3."""
    rewards = [0.3 + 3 * noise for noise in NOISE[:10]] + [0.0, 1.0] * 5 + [0.6 + 6 * noise for noise in NOISE[:10]]
    synthetic.write_run(tmp_path / "e", "sc", 0, 30, {"reward_mean": rewards})
    found = outcome("SC", read_experiment(tmp_path / "e").runs)
    assert (found.first, found.last) == (pytest.approx(0.3), pytest.approx(0.6))
    assert (found.first_error, found.last_error) == (pytest.approx(0.01), pytest.approx(0.02))


def test_over_several_seeds_noise_is_the_spread_of_the_seeds(synthetic, tmp_path):
    for seed, last in enumerate((0.5, 0.6, 0.7)):
        rewards = [0.3] * 10 + [last] * 10
        synthetic.write_run(tmp_path / "e", "sc", seed, 20, {"reward_mean": rewards})
    found = outcome("SC", read_experiment(tmp_path / "e").runs)
    assert (found.last, found.last_error) == (pytest.approx(0.6), pytest.approx(0.1 / np.sqrt(3)))
    assert found.first_error == 0.0
