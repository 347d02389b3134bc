"""Hand-computed cases of the gap statistics."""

import math

import pytest
import torch

from score_centering.validation.gaps import allowed_head_sizes, dense_gaps, head_masses, sampled_gaps

LN2, LN4 = math.log(2), math.log(4)


def test_sampled_gaps_by_hand():
    log_q = torch.tensor([-1.0, -1.0, -2.0, -3.0])
    log_p = log_q + torch.tensor([0.0, LN2, -LN2, LN4])
    numbers = sampled_gaps(log_p, log_q)
    assert numbers["abs_logprob_gap_mean"] == pytest.approx((LN2 + LN2 + LN4) / 4, rel=1e-6)
    assert numbers["abs_logprob_gap_max"] == pytest.approx(LN4, rel=1e-6)
    assert numbers["abs_logprob_gap_p95"] == pytest.approx(LN2 + 0.85 * (LN4 - LN2), rel=1e-6)
    assert numbers["k1_kl"] == pytest.approx(-LN4 / 4, rel=1e-6)
    k3 = (0 + (2 - 1 - LN2) + (0.5 - 1 + LN2) + (4 - 1 - LN4)) / 4
    assert numbers["k3_kl"] == pytest.approx(k3, rel=1e-6)
    assert numbers["token_chi2"] == pytest.approx((1 + 4 + 0.25 + 16) / 4 - 1, rel=1e-6)


def test_a_very_rare_token_is_clamped():
    assert math.isfinite(sampled_gaps(torch.tensor([-0.1]), torch.tensor([-900.0]))["k3_kl"])


def test_dense_gaps_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])
    numbers = dense_gaps(p.log(), q.log())
    assert numbers["exact_kl"] == pytest.approx((-0.25 * LN2 + 0.5 * LN2) / 2, rel=1e-6)
    assert numbers["total_variation"] == pytest.approx(0.25 / 2, rel=1e-6)
    assert numbers["top1_agreement"] == 0.5


def test_sampled_gaps_estimate_the_dense_ones():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, generator=generator)
    log_p = logits.log_softmax(0)
    log_q = (logits + 0.2 * torch.randn(64, generator=generator)).log_softmax(0)
    tokens = log_q.exp().multinomial(200_000, replacement=True, generator=generator)
    numbers = sampled_gaps(log_p[tokens], log_q[tokens])
    exact = dense_gaps(log_p[None], log_q[None])["exact_kl"]
    assert numbers["k3_kl"] == pytest.approx(exact, rel=0.02)
    assert numbers["k1_kl"] == pytest.approx(exact, abs=0.002)
    chi2 = ((2 * log_p - log_q).double().exp().sum() - 1).item()
    assert numbers["token_chi2"] == pytest.approx(chi2, rel=0.05)


def test_impossible_tokens_of_the_sampler_add_nothing():
    log_q = torch.tensor([[0.0, -math.inf]])
    assert dense_gaps(torch.tensor([[0.5, 0.5]]).log(), log_q)["exact_kl"] == pytest.approx(LN2)


def test_head_masses_by_hand():
    q = torch.tensor([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]])
    p = torch.tensor([[0.4, 0.4, 0.1], [0.7, 0.1, 0.05]])
    masses = head_masses(q.log(), p.log(), [1, 3])
    assert masses == pytest.approx(
        {
            "head_mass_sampler.k1": 0.55,
            "head_mass_trainer.k1": 0.55,
            "head_mass_sampler.k3": 0.9,
            "head_mass_trainer.k3": 0.875,
        },
        rel=1e-6,
    )


def test_head_sizes_are_clipped_to_the_vocabulary_with_a_note():
    assert allowed_head_sizes([8, 32, 128], 16, 512) == ([8, 16, 32, 128], [])
    sizes, notes = allowed_head_sizes([8, 32, 128], 8, 64)
    assert sizes == [8, 32, 64]
    assert notes == ["head size 128 exceeds the vocabulary of 64 tokens: measured at 64"]
