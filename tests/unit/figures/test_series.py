import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from score_centering.figures.series import across_seeds, spread, trailing_mean


def test_trailing_mean_by_hand():
    np.testing.assert_allclose(trailing_mean(np.array([1.0, 3.0, 5.0, 9.0]), 2), [1.0, 2.0, 4.0, 7.0])
    np.testing.assert_allclose(trailing_mean(np.array([1.0, np.nan, 5.0, np.nan, np.nan]), 2), [1, 1, 5, 5, np.nan])
    assert trailing_mean(np.empty(0)).shape == (0,)


def test_small_values_survive_a_large_one():
    """A running sum would leave 1e-9 lost in the rounding of 1e8."""
    assert trailing_mean(np.array([1e8, 1e-9, 1e-9]), 2)[2] == pytest.approx(1e-9)


def test_a_window_must_hold_a_step():
    with pytest.raises(ValueError, match="window: 0 steps"):
        trailing_mean(np.ones(3), 0)


def test_seeds_of_different_length():
    band = across_seeds([(np.array([1, 2]), np.array([1.0, 4.0])), (np.array([2, 3]), np.array([6.0, np.nan]))])
    np.testing.assert_array_equal(band.steps, [1, 2, 3])
    np.testing.assert_array_equal(band.mean, [1, 5, np.nan])
    np.testing.assert_array_equal(band.low, [1, 4, np.nan])
    np.testing.assert_array_equal(band.high, [1, 6, np.nan])
    assert band.measured().steps.tolist() == [1, 2]


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=9), st.floats(0.01, 0.4))
def test_spread_labels_keep_order_distance_and_bounds(positions, gap):
    placed = spread(positions, gap, 0.0, 1.0)
    order = np.argsort(positions, kind="stable")
    possible = min(gap, 1 / max(1, len(positions) - 1))
    assert (np.diff(placed[order]) >= possible - 1e-9).all()
    assert placed.min() >= -1e-9 and placed.max() <= 1 + 1e-9


def test_labels_with_room_stay_where_they_are():
    np.testing.assert_allclose(spread([0.9, 0.1, 0.5], 0.2, 0, 1), [0.9, 0.1, 0.5])
    np.testing.assert_allclose(spread([0.5, 0.5], 0.2, 0, 1), [0.4, 0.6])
