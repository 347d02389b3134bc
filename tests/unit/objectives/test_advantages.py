"""Advantages: hand-computed cases, and each fault seen in public implementations with its right value."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.objectives import advantages


def values(rewards, groups=None, **options):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.long) if groups is None else torch.tensor(groups)
    return advantages(rewards, groups, **options)


def test_a_group_by_hand():
    """R = 0, 0, 0, 1: mean 1/4, variance with ddof 1 is 1/4, so A = −1/2, −1/2, −1/2, 3/2 (times 1/(1 + 2e-6))."""
    result = values([0, 0, 0, 1])
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=3e-6)
    assert values([0, 0, 0, 1], normalise="mean").tolist() == [-0.25, -0.25, -0.25, 0.75]


def test_groups_may_be_interleaved_and_of_different_size():
    mixed = values([1, 10, 0, 30, 20], [7, -2, 7, -2, -2])
    assert mixed.tolist() == pytest.approx([0.5**0.5, -1, -(0.5**0.5), 1, 0], rel=3e-6)


def test_close_rewards_stay_apart():
    """In bfloat16 1.0 and 1.001 are one value."""
    assert values([1.0, 1.001], normalise="mean").tolist() == pytest.approx([-5e-4, 5e-4])
    assert values([1.0, 1.001]).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)


def test_rewards_in_half_precision_are_refused():
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="which merges close rewards; pass float32 or float64"):
            advantages(torch.ones(4, dtype=dtype), torch.zeros(4, dtype=torch.long))


def test_a_small_difference_is_normalised_right():
    """[1, 1, 1, 1.0078125] gives [0, 0, 0, 2] when it is computed in bfloat16."""
    assert values([1, 1, 1, 1.0078125]).tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(-10, 10), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_zero(reward, size, dtype):
    """0.1, 0.3, …: the mean of n equal values differs from them, and dividing that residue gives advantages of
    thousands."""
    rewards = torch.full((size,), reward, dtype=dtype)
    for normalise in ("std", "mean"):
        assert advantages(rewards, torch.zeros(size, dtype=torch.long), normalise).tolist() == [0.0] * size


def test_a_group_of_one_is_zero():
    assert values([5, 1, 0], [0, 1, 1]).tolist() == pytest.approx([0, 0.5**0.5, -(0.5**0.5)], rel=3e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_names_its_rollout(bad):
    with pytest.raises(ValueError, match=f"the reward of rollout 2 \\(group 9\\) is {bad}; rewards must be finite"):
        values([0, 1, bad, 1], [8, 8, 9, 9])


def test_integer_and_numpy_rewards_are_taken():
    expected = values([0, 1]).tolist()
    assert advantages(torch.tensor([0, 1]), torch.tensor([3, 3])).tolist() == expected
    assert advantages(np.array([0, 1], dtype=np.float32), np.array([3, 3])).tolist() == expected


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=30), st.randoms()
)
def test_order_and_other_groups_do_not_matter(rollouts, random):
    groups, rewards = [g for g, _ in rollouts], [r for _, r in rollouts]
    whole = values(rewards, groups)
    order = list(range(len(rollouts)))
    random.shuffle(order)
    shuffled = values([rewards[i] for i in order], [groups[i] for i in order])
    assert torch.allclose(shuffled, whole[order], atol=1e-6)
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group]
        assert torch.allclose(values([rewards[i] for i in rows]), whole[rows], atol=1e-6)
        assert whole[rows].sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "groups", "normalise", "message"),
    [
        (torch.ones(3), torch.zeros(2), "std", r"rewards \(3,\) and group_ids \(2,\) must be one length"),
        (torch.ones(2, 2), torch.zeros(2, 2), "std", "must be one length"),
        (torch.ones(2), torch.zeros(2), "max", "normalise 'max' is not one of std, mean"),
    ],
)
def test_bad_arguments_are_refused(rewards, groups, normalise, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, groups, normalise)
