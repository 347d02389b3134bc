"""The capture record: the 16-bit grid and oracle 8's faults."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from score_centering.rollout import (
    Rollout,
    Sampling,
    candidates,
    mean_response_length,
    sampled_entropy,
    validate,
    validate_all,
)

VOCAB = 10


def make(**changes) -> Rollout:
    """3 tokens, 2 candidates each; the sampled token is candidate 0, candidate 1, and in the tail."""
    p = np.array([[0.6, 0.3], [0.5, 0.25], [0.7, 0.2]], dtype=np.float32)
    fields = {
        "prompt_index": 4,
        "sample_index": 1,
        "prompt_ids": np.array([1, 2], dtype=np.int32),
        "token_ids": np.array([3, 5, 9], dtype=np.int32),
        "logprobs": np.log(np.array([0.6, 0.25, 0.01], dtype=np.float32)),
        "candidate_ids": np.array([[3, 4], [6, 5], [0, 1]], dtype=np.int32),
        "candidate_logprobs": candidates.round_logprobs(np.log(p)),
        "finish_reason": "stop",
    }
    return Rollout(**{**fields, **changes})


def edited(field: str, index, value) -> Rollout:
    array = getattr(make(), field).copy()
    array[index] = value
    return make(**{field: array})


def test_a_sound_record_passes():
    validate(make(), VOCAB)
    validate(make(candidate_ids=None, candidate_logprobs=None), VOCAB)
    validate_all([], VOCAB)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (edited("candidate_ids", (1, 0), 5), "position 1: a candidate id occurs twice"),
        (edited("candidate_logprobs", (2, 0), 0.1), "position 2: a candidate log-prob is positive"),
        (edited("logprobs", 1, 0.5), "position 1: log-prob of the sampled token is positive"),
        (edited("logprobs", 0, np.nan), "position 0: log-prob of the sampled token is not finite"),
        (edited("candidate_logprobs", (0, 1), -np.inf), "position 0: a candidate log-prob is not finite"),
        (edited("candidate_logprobs", 2, [0, -0.1]), "position 2: candidates sum to more than 1.001"),
        (edited("candidate_logprobs", 2, [-2, -1]), "position 2: candidates are not sorted"),
        (edited("logprobs", 1, np.log(0.3)), "position 1: the sampled token's log-prob differs"),
        (edited("token_ids", 2, VOCAB), "position 2: token id outside"),
        (edited("candidate_ids", (0, 0), -1), "position 0: candidate id outside"),
        (make(logprobs=make().logprobs[:2]), "position 2: 3 tokens but 2 rows of logprobs"),
        (
            make(candidate_ids=make().candidate_ids[:1], candidate_logprobs=make().candidate_logprobs[:1]),
            "position 1: 3 tokens but 1 rows of candidate_ids",
        ),
        (make(candidate_ids=make().candidate_ids[:, :1]), r"must both be \(R, K\)"),
        (make(candidate_logprobs=None), "must come together"),
        (make(logprobs=make().logprobs.astype(np.float64)), "logprobs is float64"),
        (make(finish_reason="completed"), "finish_reason 'completed'"),
        (make(token_ids=np.zeros(0, np.int32)), "no generated token"),
    ],
)
def test_faults_name_rollout_and_position(rollout, message):
    with pytest.raises(ValueError, match=r"rollout \(prompt 4, sample 1\)") as error:
        validate(rollout, VOCAB)
    assert error.match(message)


def test_a_batch_names_the_faulty_rollout():
    bad = dataclasses.replace(edited("logprobs", 1, 0.5), prompt_index=7)
    with pytest.raises(ValueError, match=r"prompt 7, sample 1\), position 1"):
        validate_all([make(), bad, make()], VOCAB)


def test_more_candidates_than_vocabulary_are_refused():
    with pytest.raises(ValueError, match="2 candidates, allowed are 1 … 1"):
        validate(make(), 1)


def test_a_shifted_row_is_found():
    ids = np.roll(make().candidate_ids, 1, axis=0)
    ids[0] = [3, 4]
    shifted = make(token_ids=np.array([3, 3, 9], np.int32), candidate_ids=ids)
    with pytest.raises(ValueError, match="position 1: the sampled token's log-prob differs"):
        validate(shifted, VOCAB)


@given(st.lists(st.floats(-63.875, 0, width=32), min_size=1, max_size=20))
def test_the_grid_errs_by_less_than_half_a_milli_nat_and_is_idempotent(values):
    logprobs = np.array(values, dtype=np.float32)
    rounded = candidates.round_logprobs(logprobs)
    assert np.abs(rounded - logprobs).max() < 5e-4
    assert rounded.dtype == np.float32 and (rounded <= 0).all()
    np.testing.assert_array_equal(candidates.round_logprobs(rounded), rounded)
    np.testing.assert_array_equal(candidates.decode_logprobs(candidates.encode_logprobs(rounded)), rounded)


def test_the_grid_at_its_ends():
    np.testing.assert_array_equal(
        candidates.encode_logprobs(np.array([0, -1, -64, -1000, -np.inf], np.float32)), [0, 1024, 65535, 65535, 65535]
    )
    assert np.signbit(candidates.round_logprobs(np.zeros(1, np.float32))).tolist() == [False]
    for wrong in (0.1, np.nan):
        with pytest.raises(ValueError, match="at most 0 nats"):
            candidates.encode_logprobs(np.array([wrong], np.float32))


def test_sampling_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=0, max_tokens=1, greedy=False, stop_token_ids=())
    with pytest.raises(ValueError, match="max_tokens"):
        Sampling(temperature=1, max_tokens=0, greedy=False, stop_token_ids=())


def test_entropy_and_length_by_hand():
    """Means over all tokens of both rollouts, and over the rollouts."""
    rollouts = [SimpleNamespace(token_ids=np.zeros(len(q)), logprobs=np.float32(q)) for q in ([-1.0, -0.5], [-3.0])]
    assert sampled_entropy(rollouts) == pytest.approx(1.5)
    assert mean_response_length(rollouts) == 1.5
    assert math.isnan(sampled_entropy([])) and math.isnan(mean_response_length([]))
