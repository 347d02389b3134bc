"""The law that tells lost runs from their first updates: areas by hand, halves, and fits whose answer is known."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from score_centering.figures.law import area, half_of, law


def test_area_under_the_curve_by_hand():
    # Three of the four pairs of a lost and a kept run are in order.
    assert area(np.array([0.9, 0.4, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0])) == 0.75
    assert area(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0.5
    assert math.isnan(area(np.array([0.5, 0.2]), np.array([1.0, 1.0])))


@given(st.lists(st.tuples(st.integers(-50, 50), st.booleans()), min_size=2, max_size=40))
def test_an_area_ignores_the_scale_and_a_turned_score_has_the_rest(pairs):
    score, target = np.array([pair[0] for pair in pairs], float), np.array([pair[1] for pair in pairs], float)
    if 0 < target.sum() < len(target):
        assert area(score, target) == area(np.exp(score / 50), target)
        assert area(score, target) == pytest.approx(1 - area(-score, target))


def test_a_half_is_the_checksum_s():
    assert half_of("cell") == (zlib.crc32(b"cell") % 2 == 0)
    shares = np.mean([half_of(f"cell {index}") for index in range(1000)])
    assert 0.4 < shares < 0.6


def cells_of(halves):
    """A cell for each run, in the half that is asked for, all different."""
    every = [f"c{index}" for index in range(10 * len(halves) + 20)]
    names = {half: iter([name for name in every if half_of(name) == half]) for half in (True, False)}
    return [next(names[half]) for half in halves]


def test_a_feature_that_tells_all_tells_the_other_half_and_noise_gets_no_weight():
    """K3 decides alone: both areas are 1, its weight is the largest, and the sign says that more of it loses runs."""
    random = np.random.default_rng(0)
    k3, noise = np.exp(random.normal(size=200)), np.exp(random.normal(size=200))
    target = (k3 > 1).astype(float)
    found = law(np.column_stack([k3, noise]), target, cells_of([True, False] * 100), ["k3", "noise"])
    assert found.other > 0.99 and found.fitted > 0.99 and (found.fitted_runs, found.other_runs) == (100, 100)
    assert found.weights["k3"] > 5 * abs(found.weights["noise"])
    turned = law(np.column_stack([1 / k3, noise]), target, cells_of([True, False] * 100), ["k3", "noise"])
    assert turned.weights["k3"] < 0 and turned.other > 0.99


def test_what_holds_in_one_half_only_does_not_pass_for_a_law():
    """In the other half the feature means the opposite."""
    k3 = np.exp(np.linspace(-1, 1, 40))
    halves = [True, False] * 20
    target = np.where(halves, k3 > 1, k3 < 1).astype(float)
    found = law(k3[:, None], target, cells_of(halves), ["k3"])
    assert found.fitted > 0.99 and found.other < 0.01


def test_one_feature_by_hand():
    """Two runs at e^±1, one lost: standardised ±1, weights (0, w) where w solves w = 2 / (1 + e^w)."""
    found = law(np.exp([[1.0], [-1.0]]), np.array([1.0, 0.0]), cells_of([True, True]), ["x"])
    weight = found.weights["x"]
    assert weight == pytest.approx(2 / (1 + math.exp(weight)), abs=1e-6)
    assert found.fitted == 1 and math.isnan(found.other) and found.other_runs == 0


def test_no_cell_to_fit_on():
    with pytest.raises(ValueError, match="no cell is in the half"):
        law(np.ones((1, 1)), np.ones(1), cells_of([False]), ["x"])
