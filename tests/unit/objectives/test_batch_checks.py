"""Oracle 8: faults of what was recorded are refused with the rollout and the position."""

from dataclasses import replace

import pytest
import torch

from score_centering.objectives import validate_batch

LENGTHS = [3, 5, 4]
ROW, PLACE = 6, "rollout 1, position 3"


@pytest.fixture
def batch(reference):
    return reference.random_batch(12, 30, 5, y_in_head=True)[1]


def changed(column, row, value):
    column = column.clone()
    column[row] = torch.as_tensor(value, dtype=column.dtype)
    return column


def test_a_sound_batch_passes(batch):
    validate_batch(batch, 30, LENGTHS)
    validate_batch(replace(batch, candidate_ids=None, candidate_logprobs=None), 30, LENGTHS)


def test_candidates_rounded_to_16_bits_pass(batch):
    validate_batch(replace(batch, candidate_logprobs=(batch.candidate_logprobs * 1024).round() / 1024), 30, LENGTHS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("candidate_ids", [1, 2, 3, 4, 1], "a candidate id appears twice"),
        ("candidate_ids", [1, 2, 3, 4, 30], "a candidate id is outside 0…29"),
        ("candidate_ids", [-1, 2, 3, 4, 5], "a candidate id is outside 0…29"),
        ("candidate_logprobs", [0.1, -9, -9, -9, -9], "a candidate log-prob is positive"),
        ("candidate_logprobs", [float("nan"), -9, -9, -9, -9], "a candidate log-prob is NaN"),
        ("candidate_logprobs", [-0.5, -1.0, -3.0, -4.0, -5.0], "the candidates' mass is above 1.001"),
        ("target_ids", 30, "the sampled id is outside 0…29"),
        ("target_ids", -100, "the sampled id is outside 0…29"),
        ("sampler_logprobs", 1e-3, "the sampled log-prob is positive"),
        ("sampler_logprobs", float("nan"), "the sampled log-prob is NaN"),
        ("sampler_logprobs", -19.0, "a shifted row"),
    ],
)
def test_a_fault_names_rollout_and_position(batch, field, value, message):
    faulty = replace(batch, **{field: changed(getattr(batch, field), ROW, value)})
    with pytest.raises(ValueError, match=f"^token batch: {PLACE}: .*{message}"):
        validate_batch(faulty, 30, LENGTHS)
    with pytest.raises(ValueError, match=f"^token batch: row {ROW}: .*{message}"):
        validate_batch(faulty, 30)
    masked = replace(faulty, mask=changed(batch.mask, ROW, False))
    validate_batch(masked, 30, LENGTHS)


def test_heads_shifted_by_one_position_are_found(batch):
    shifted = replace(
        batch, candidate_ids=batch.candidate_ids.roll(1, 0), candidate_logprobs=batch.candidate_logprobs.roll(1, 0)
    )
    with pytest.raises(ValueError, match="a shifted row"):
        validate_batch(shifted, 30, LENGTHS)


def test_a_row_count_that_does_not_match_is_refused(batch):
    with pytest.raises(ValueError, match="the rollouts have 11 tokens, the batch has 12 rows"):
        validate_batch(batch, 30, [3, 4, 4])
    with pytest.raises(ValueError, match="must both be"):
        validate_batch(
            replace(batch, candidate_ids=batch.candidate_ids[:-1], candidate_logprobs=batch.candidate_logprobs[:-1]), 30
        )
