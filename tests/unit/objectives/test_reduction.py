"""Loss weights: their sums, and token counts that half precision cannot hold."""

import pytest
import torch

from score_centering.objectives import sequence_mean_weights, token_mean_weights

LENGTHS = torch.tensor([3, 1, 4])


def test_the_token_mean_divides_by_the_tokens_of_the_update():
    assert token_mean_weights(LENGTHS, 8).tolist() == [0.125] * 8
    assert token_mean_weights(LENGTHS[:1], 8).tolist() == [0.125] * 3


def test_the_sequence_mean_divides_by_rows_and_length():
    weights = sequence_mean_weights(LENGTHS, 3)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([1 / 9] * 3 + [1 / 3] + [1 / 12] * 4)
    assert sequence_mean_weights(LENGTHS, 6).sum().item() == pytest.approx(0.5)


@pytest.mark.parametrize("tokens", [257, 8191 * 128, 33_554_433])
def test_counts_that_half_precision_rounds_or_overflows_are_exact(tokens):
    """bfloat16 makes 257 tokens 256, float16 makes 8191·128 infinite."""
    weight = token_mean_weights(torch.tensor([2]), tokens)[0].item()
    assert weight == torch.tensor(1 / tokens, dtype=torch.float32).item()
    assert weight == pytest.approx(1 / tokens, rel=6e-8)
    sequence = sequence_mean_weights(torch.tensor([257]), 128)[0].item()
    assert sequence == pytest.approx(1 / (257 * 128), rel=6e-8)


def test_a_rollout_without_tokens_stays_in_the_denominator():
    assert sequence_mean_weights(torch.tensor([2, 0]), 2).tolist() == [0.25, 0.25]


def test_empty_updates_are_refused():
    with pytest.raises(ValueError, match="update_tokens is 0"):
        token_mean_weights(LENGTHS, 0)
    with pytest.raises(ValueError, match="update_rows is 0"):
        sequence_mean_weights(LENGTHS, 0)
