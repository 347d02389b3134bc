"""The declared rule of the collapse, and the counts of what is left with a condition taken away."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from score_centering.figures.outcome import ending, healthy, held, lost, taken_away


def test_an_ending_by_hand():
    """Ten steps of 0.1, twenty of 0.5, twenty of 0.2: the last window and the best one are those of one value."""
    end = ending([np.nan, *[0.1] * 10, *[0.5] * 20, *[0.2] * 20])
    assert (end.last, end.peak, end.best) == pytest.approx((0.2, 0.5, 0.5))
    assert ending([0.1] * 30, start=0.33).best == 0.33
    assert ending([0.1] * 30, start=np.nan).best == pytest.approx(0.1)


def test_a_run_shorter_than_the_window_is_one_window():
    end = ending([0.2, np.nan, 0.4])
    assert end.last == end.peak == pytest.approx(0.3)
    with pytest.raises(ValueError, match="no step has a reward"):
        ending([np.nan])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_a_peak_is_no_lower_than_the_end_and_no_higher_than_the_best_step(rewards):
    end = ending(rewards)
    assert end.last <= end.peak <= max(rewards) + 1e-12


def test_the_rule_by_hand():
    """Control 0.6: its quarter is 0.15, its 95 % 0.57. A run of no high best is not lost."""
    last, best = np.array([0.14, 0.14, 0.16, 0.56, 0.57, 0.7]), np.array([0.6, 0.5, 0.7, 0.6, 0.6, 0.7])
    assert lost(last, best, 0.6).tolist() == [True, False, False, False, False, False]
    assert held(last, 0.6).tolist() == [False, False, False, False, True, True]
    assert healthy(np.array([0.54, 0.53, 0.0]), np.array([0.6, 0.6, 0.0])).tolist() == [True, False, False]
    nothing = np.array([np.nan])
    assert not lost(np.array([0.0]), np.array([0.5]), nothing).any() and not held(np.array([0.5]), nothing).any()


def test_a_condition_taken_away_by_hand():
    runs = pd.DataFrame({"arm": ["a", "a", "b", "a"], "reward_last": [0.1, 0.5, 0.6, 0.4]}, index=[3, 5, 7, 9])
    cases = {"all": runs["reward_last"] > 0, "high": runs["reward_last"] > 0.45, "none": runs["reward_last"] > 1}
    table = taken_away(runs, cases, {"a": "A", "b": "B"}, runs["reward_last"] < 0.45, "gone")
    assert table.columns.tolist() == ["condition", "A gone", "B gone", "A ends", "B ends"]
    assert table.to_numpy().tolist() == [
        ["all", "2 of 3", "0 of 1", "0.33", "0.60"],
        ["high", "0 of 1", "0 of 1", "0.50", "0.60"],
        ["none", "–", "–", "–", "–"],
    ]
