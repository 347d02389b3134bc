"""Metrics: hand-computed values, the K3 clamp, maxima, and what is absent."""

import math
from dataclasses import replace

import pytest
import torch

from score_centering.objectives import Objective, TokenBatch, add_sums, finalise_metrics, policy_loss_from_logits
from score_centering.objectives.weights import Mis, Tis

TIS = Objective("grpo_tis", False, Tis(2.0))


def tokens_with_gaps(gaps, advantages=None, mask=None):
    """A vocabulary of two with p = ½, and sampled log-probs log ½ − d."""
    count = len(gaps)
    rows = torch.ones(count, dtype=torch.float64)
    batch = TokenBatch(
        target_ids=torch.zeros(count, dtype=torch.int64),
        sampler_logprobs=math.log(0.5) - torch.tensor(gaps, dtype=torch.float64),
        advantages=rows if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        loss_weights=rows / count,
        mask=rows == 1 if mask is None else torch.tensor(mask),
    )
    return torch.zeros(count, 2, dtype=torch.float64), batch


def metrics_of(gaps, objective=TIS, **options):
    return finalise_metrics(policy_loss_from_logits(*tokens_with_gaps(gaps, **options), objective).sums)


def test_values_by_hand():
    """d = 0, log 4, −log 2 and a masked row; f(r) = min(r, 2)."""
    four, two = math.log(4), math.log(2)
    metrics = metrics_of([0.0, four, -two, 9.0], advantages=[1.0, -3.0, 0.5, 7.0], mask=[True, True, True, False])
    assert metrics["k3_kl"] == pytest.approx((0 + (4 - 1 - four) + (0.5 - 1 + two)) / 3)
    assert metrics["k1_kl"] == pytest.approx((0 - four + two) / 3)
    assert metrics["abs_logprob_gap_mean"] == pytest.approx((four + two) / 3)
    assert metrics["abs_logprob_gap_max"] == pytest.approx(four)
    assert metrics["importance_ratio_max"] == pytest.approx(4)
    assert metrics["token_chi2"] == pytest.approx((0 + (16 - 1) + (0.25 - 1)) / 3)
    assert metrics["importance_weight_mean"] == pytest.approx((1 + 2 + 0.5) / 3)
    assert metrics["importance_masked_share"] == 0
    assert metrics["advantage_abs_mean"] == pytest.approx(4.5 / 3)
    assert metrics["entropy"] == pytest.approx(two)
    assert metrics["k3_clamped_tokens"] == 0
    assert metrics["loss"] == pytest.approx(two * (1 * 1 - 2 * 3 + 0.5 * 0.5) / 4)


def test_k3_is_never_negative_and_exact_near_zero():
    """exp(d) − 1 loses the digits of a small d; expm1 does not."""
    assert metrics_of([1e-6])["k3_kl"] == pytest.approx(5e-13, rel=1e-6, abs=0)


@pytest.mark.parametrize("gap", [25.0, -25.0, 1000.0])
def test_a_very_rare_token_is_clamped_and_counted(gap):
    metrics = metrics_of([gap, 0.0])
    bounded = math.copysign(20, gap)
    assert metrics["k3_kl"] == pytest.approx((math.expm1(bounded) - bounded) / 2)
    assert metrics["k3_clamped_tokens"] == 1 and isinstance(metrics["k3_clamped_tokens"], int)
    assert metrics["k1_kl"] == pytest.approx(-gap / 2)
    assert metrics["abs_logprob_gap_max"] == pytest.approx(abs(gap))
    assert math.isfinite(metrics["token_chi2"])


def test_the_masked_share_counts_weights_of_zero():
    metrics = metrics_of([0.0, math.log(6), -math.log(3), 0.1], Objective("grpo_mis", False, Mis(0.5, 5.0)))
    assert metrics["importance_masked_share"] == 0.5
    assert metrics["importance_weight_mean"] == pytest.approx((1 + math.exp(0.1)) / 4)


def test_the_clip_share_counts_tokens_whose_gradient_the_clip_removes():
    grpo = Objective("grpo", False, clip_low=0.2, clip_high=0.3)
    logits, batch = tokens_with_gaps([0.0] * 5, advantages=[1.0, 1.0, -1.0, -1.0, 1.0])
    old = math.log(0.5) - torch.tensor([1.4, 1.2, 0.7, 1.4, 0.7], dtype=torch.float64).log()
    logits.requires_grad_()
    result = policy_loss_from_logits(logits, replace(batch, old_logprobs=old), grpo)
    result.loss.backward()
    assert (logits.grad[:, 0] == 0).tolist() == [True, False, True, False, False]
    metrics = finalise_metrics(result.sums)
    assert metrics["clip_share"] == pytest.approx(2 / 5)
    assert metrics["loss"] == pytest.approx(-(1.3 + 1.2 - 0.8 - 1.4 + 0.7) / 5)
    assert "importance_weight_mean" not in metrics


def test_without_old_log_probs_the_ratio_is_one_and_the_clip_inert():
    grpo = Objective("grpo", False, clip_low=0.2, clip_high=0.3)
    metrics = metrics_of([0.7, -0.4], grpo, advantages=[1.0, -2.0])
    assert metrics["clip_share"] == 0
    assert metrics["loss"] == pytest.approx(0.5)


def test_head_metrics_belong_to_centering_alone(reference):
    logits, batch = reference.random_batch(20, 40, 6)
    metrics = finalise_metrics(policy_loss_from_logits(logits, batch, reference.objectives["sc"]).sums)
    p, q = logits.softmax(1).gather(1, batch.candidate_ids.long()), batch.candidate_logprobs.exp()
    rho = (1 - q.sum(1)) / (1 - p.sum(1))
    assert metrics["head_mass_sampler"] == pytest.approx(q.sum(1).mean().item())
    assert metrics["head_mass_trainer"] == pytest.approx(p.sum(1).mean().item())
    assert metrics["correction_abs_mean"] == pytest.approx((q - rho[:, None] * p).abs().sum(1).mean().item())
    assert "head_mass_sampler" not in finalise_metrics(policy_loss_from_logits(logits, batch, TIS).sums)


def test_entropy_is_that_of_the_tempered_trainer(reference):
    logits, batch = reference.random_batch(20, 40, 6)
    log_p = (logits / 1.7).log_softmax(1)
    metrics = finalise_metrics(policy_loss_from_logits(logits, batch, TIS, temperature=1.7).sums)
    assert metrics["entropy"] == pytest.approx(-(log_p.exp() * log_p).sum(1).mean().item())


def test_sums_of_different_objectives_do_not_add():
    first = policy_loss_from_logits(*tokens_with_gaps([0.0]), TIS).sums
    second = policy_loss_from_logits(
        *tokens_with_gaps([0.0]), Objective("grpo", False, clip_low=0.2, clip_high=0.2)
    ).sums
    with pytest.raises(ValueError, match="importance_weight_mean"):
        add_sums(first, second)


def test_an_update_without_tokens_has_no_means():
    sums = policy_loss_from_logits(*tokens_with_gaps([0.0], mask=[False]), TIS).sums
    with pytest.raises(ValueError, match="holds no generated token"):
        finalise_metrics(sums)


def test_an_empty_microbatch_adds_nothing():
    logits, batch = tokens_with_gaps([0.3])
    empty = TokenBatch(batch.target_ids[:0], *[torch.zeros(0, dtype=torch.float64)] * 3, batch.mask[:0])
    none = policy_loss_from_logits(logits[:0], empty, TIS)
    some = policy_loss_from_logits(logits, batch, TIS)
    assert none.loss.item() == 0
    assert finalise_metrics(add_sums(some.sums, none.sums)) == finalise_metrics(some.sums)


def test_effective_sample_size_and_the_ratios_by_hand():
    """r = 1, 4, ½: (5.5)² / (3 · 17.25)."""
    metrics = metrics_of([0.0, math.log(4), -math.log(2), 9.0], mask=[True, True, True, False])
    assert metrics["importance_ratio_mean"] == pytest.approx(5.5 / 3)
    assert metrics["effective_sample_share"] == pytest.approx(5.5**2 / (3 * 17.25))
    assert metrics_of([0.3] * 5)["effective_sample_share"] == pytest.approx(1)


def test_the_99th_percentile_is_that_of_the_sorted_ratios_rounded_up():
    gaps = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = gaps.sort().values[989].exp().item()
    assert 1 <= metrics_of(gaps.tolist())["importance_ratio_p99"] / exact <= math.exp(0.01) + 1e-9
    assert metrics_of([0.0] * 99 + [5.0])["importance_ratio_p99"] == pytest.approx(1)
    assert metrics_of([0.0] * 98 + [0.5] * 2)["importance_ratio_p99"] == pytest.approx(math.exp(0.5))
    assert metrics_of([50.0, -50.0])["importance_ratio_p99"] == pytest.approx(math.exp(10)), "beyond the last bin"


def test_shares_by_the_sign_of_the_advantage():
    """Band [0.5, 5]: r = 1, 6 | ⅓, 6, 1 | 6 with advantages + + | − − − | 0."""
    six, third = math.log(6), -math.log(3)
    gains = [1.0, 2.0, -1.0, -1.0, -2.0, 0.0]
    metrics = metrics_of(
        [0.0, six, third, six, 0.0, six], Objective("grpo_mis", False, Mis(0.5, 5.0)), advantages=gains
    )
    assert metrics["importance_masked_share"] == pytest.approx(4 / 6)
    assert metrics["importance_masked_share_positive"] == pytest.approx(1 / 2)
    assert metrics["importance_masked_share_negative"] == pytest.approx(2 / 3)
    capped = metrics_of([0.0, six, third, six, 0.0, six], advantages=gains)
    shares = [capped[f"clip_share{sign}"] for sign in ("", "_positive", "_negative")]
    assert shares == pytest.approx([3 / 6, 1 / 2, 1 / 3])
    assert metrics_of([0.0], advantages=[1.0])["clip_share_negative"] is None


def test_k3_by_position_in_the_response():
    """A rollout of five tokens, quarters of 2, 1, 1, 1, and one of one token, which lies in the first quarter."""
    gaps = [0.1, 0.2, 9.0, 0.3, 0.4, 0.5, 0.6]
    mask = [True, True, False, True, True, True, True]
    logits, batch = tokens_with_gaps(gaps, mask=mask)
    batch = replace(batch, sequence_ids=torch.tensor([0, 0, 7, 0, 0, 0, 1]))
    metrics = finalise_metrics(policy_loss_from_logits(logits, batch, TIS).sums)
    k3 = [math.expm1(gap) - gap for gap in gaps]
    wanted = [(k3[0] + k3[1] + k3[6]) / 3, k3[3], k3[4], k3[5]]
    assert [metrics[f"k3_kl_position_{i}"] for i in (1, 2, 3, 4)] == pytest.approx(wanted)


def test_k3_by_entropy():
    """Two tokens at log 2 = 0.69 nats of entropy, the third band; two that are certain, the first."""
    logits, batch = tokens_with_gaps([0.1, 0.2, 0.0, 0.0])
    logits[2:] = torch.tensor([40.0, 0.0])
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.index_fill(0, torch.tensor([2, 3]), -0.3))
    metrics = finalise_metrics(policy_loss_from_logits(logits, batch, TIS).sums)
    k3 = [math.expm1(gap) - gap for gap in (0.1, 0.2, 0.3)]
    found = [metrics[f"k3_kl_entropy_{i}"] for i in (1, 2, 3, 4)]
    assert found == [pytest.approx(k3[2]), None, pytest.approx((k3[0] + k3[1]) / 2), None]
