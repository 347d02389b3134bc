"""Padding and the split into microbatches, chunks and ranks change nothing."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.objectives import TokenBatch, add_sums, finalise_metrics, policy_loss_from_hidden

VOCAB, WIDTH = 23, 5


def take(batch, rows):
    return TokenBatch(
        **{f.name: None if getattr(batch, f.name) is None else getattr(batch, f.name)[rows] for f in fields(batch)}
    )


def run(hidden, weight, microbatches, objective, chunk_size):
    """Loss, gradients of both inputs and metrics of one update whose microbatches are lists of row numbers."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, sums = 0.0, None
    for rows, batch in microbatches:
        result = policy_loss_from_hidden(hidden[rows], weight, batch, objective, chunk_size=chunk_size)
        result.loss.backward()
        loss, sums = loss + result.loss.item(), add_sums(sums, result.sums)
    return loss, hidden.grad, weight.grad, finalise_metrics(sums)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(2, 24),
    cuts=st.lists(st.integers(1, 23), max_size=4),
    padding=st.integers(0, 5),
    chunk_size=st.integers(1, 30),
)
def test_oracle_10_split_and_padding_change_nothing(reference, objective, seed, tokens, cuts, padding, chunk_size):
    _, batch = reference.random_batch(tokens, VOCAB, 4, seed, mismatch=1.5)
    batch = replace(batch, old_logprobs=batch.sampler_logprobs)
    if objective.weighs_rollouts or seed % 2:  # what goes by rollouts needs them whole
        cuts = [cut for cut in cuts if cut < tokens and batch.sequence_ids[cut - 1] != batch.sequence_ids[cut]]
    else:
        batch = replace(batch, sequence_ids=None)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    everything = torch.arange(tokens)
    whole = run(hidden, weight, [(everything, batch)], objective, chunk_size=tokens)

    edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    microbatches = []
    for start, stop in pairwise(edges):
        rows = torch.cat([everything[start:stop], torch.zeros(padding, dtype=torch.long)])
        padded = take(batch, rows)
        real = torch.arange(len(rows)) < stop - start
        microbatches.append(
            (rows, replace(padded, mask=real, sampler_logprobs=padded.sampler_logprobs.where(real, torch.nan)))
        )
    split = run(hidden, weight, microbatches[::-1], objective, chunk_size)

    assert abs(whole[0] - split[0]) < 1e-12
    assert torch.allclose(whole[1], split[1], atol=1e-13)
    assert torch.allclose(whole[2], split[2], atol=1e-13)
    assert whole[3].keys() == split[3].keys()
    for name, value in whole[3].items():
        assert split[3][name] == (None if value is None else pytest.approx(value, rel=1e-11, abs=1e-11)), name
