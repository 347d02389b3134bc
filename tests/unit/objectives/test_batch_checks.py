"""Shapes and dtypes of a token batch; what the sampler recorded is judged on arrival (`rollout.validate_all`)."""

from dataclasses import replace

import pytest
import torch

from score_centering.objectives.batch import check_shapes

TOKENS, VOCAB = 12, 30


@pytest.fixture
def batch(reference):
    return reference.random_batch(TOKENS, VOCAB, 5, y_in_head=True)[1]


def test_a_sound_batch_passes(batch):
    check_shapes(batch, TOKENS, VOCAB, needs_candidates=True)
    check_shapes(replace(batch, candidate_ids=None, candidate_logprobs=None), TOKENS, VOCAB, needs_candidates=False)


@pytest.mark.parametrize("name", ["target_ids", "sampler_logprobs", "advantages", "loss_weights", "mask"])
def test_a_vector_of_another_length_is_named(batch, name):
    short = replace(batch, **{name: getattr(batch, name)[1:]})
    with pytest.raises(ValueError, match=rf"token batch: {name} has shape \(11,\) for 12 tokens; it must be \(12,\)"):
        check_shapes(short, TOKENS, VOCAB, needs_candidates=True)


def test_a_mask_is_boolean(batch):
    with pytest.raises(ValueError, match=r"mask is torch.float32; it must be torch.bool"):
        check_shapes(replace(batch, mask=batch.mask.float()), TOKENS, VOCAB, needs_candidates=True)


def test_candidates_are_there_where_an_objective_needs_them(batch):
    with pytest.raises(ValueError, match="score centering needs candidate_ids and candidate_logprobs"):
        check_shapes(replace(batch, candidate_ids=None), TOKENS, VOCAB, needs_candidates=True)


@pytest.mark.parametrize(
    "names", [("candidate_ids",), ("candidate_logprobs",), ("candidate_ids", "candidate_logprobs")]
)
def test_candidates_of_another_number_of_rows_are_refused(batch, names):
    short = replace(batch, **{name: getattr(batch, name)[:-1] for name in names})
    with pytest.raises(ValueError, match=r"must both be \(12, K\)"):
        check_shapes(short, TOKENS, VOCAB, needs_candidates=True)


def test_no_more_candidates_than_vocabulary(batch):
    with pytest.raises(ValueError, match="K = 5 candidates of a vocabulary of 4"):
        check_shapes(batch, TOKENS, 4, needs_candidates=True)
    none = replace(batch, candidate_ids=torch.zeros(TOKENS, 0), candidate_logprobs=torch.zeros(TOKENS, 0))
    with pytest.raises(ValueError, match="K = 0 candidates"):
        check_shapes(none, TOKENS, VOCAB, needs_candidates=True)
