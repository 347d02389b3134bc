"""What must hold for every centred objective, each a consequence of the formula that no other implementation is needed
for."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from score_centering.objectives import (
    Objective,
    TokenBatch,
    build_weight,
    policy_loss_from_hidden,
    policy_loss_from_logits,
)
from score_centering.objectives.weights import Importance, TrustRegion


def gradient(logits, batch, objective, temperature=1.0):
    logits = logits.detach().clone().requires_grad_()
    policy_loss_from_logits(logits, batch, objective, temperature).loss.backward()
    return logits.grad


def unit(batch, **changes):
    """The batch with A = 1 and w = 1 in every row."""
    ones = torch.ones_like(batch.advantages)
    return replace(batch, advantages=ones, loss_weights=ones, **changes)


def every_sampled_token(logits, batch, q_hat):
    """One position repeated V times, row y with y as the sampled token and its log q̂_y as the recorded log-prob."""
    vocab = logits.shape[1]
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    rows = TokenBatch(
        **{name: None if value is None else value[:1].repeat_interleave(vocab, 0) for name, value in columns.items()}
    )
    return logits[:1].expand(vocab, vocab), unit(rows, target_ids=torch.arange(vocab), sampler_logprobs=q_hat[0].log())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(3, 40),
    share=st.floats(0, 1),
    mismatch=st.floats(0, 3),
    temperature=st.floats(0.3, 3),
    cap=st.floats(1.1, 4.0),
)
def test_oracle_1_a_constant_advantage_gives_no_expected_update(
    reference, centred, seed, vocab, share, mismatch, temperature, cap
):
    """Σ_y q̂_y ∇ℓ_y = 0 for every f."""
    limits = {"tis_max": cap, "mis_max": cap, "mis_min": 1 / cap}
    own = {field.name: limits[field.name] for field in fields(centred.weight) if field.name in limits}
    objective = replace(centred, weight=replace(centred.weight, **own))
    candidates = 1 + round(share * (vocab - 2))
    logits, batch = reference.random_batch(1, vocab, candidates, seed, mismatch)
    q_hat = reference.implied_sampler(logits.softmax(1), batch.candidate_ids, batch.candidate_logprobs)
    tails = [
        distribution.scatter(1, batch.candidate_ids.long(), 0.0).sum() for distribution in (q_hat, logits.softmax(1))
    ]
    assume(min(tails) > 1e-5 and tails[0] < 100 * tails[1])
    if isinstance(objective.weight, TrustRegion):  # the tail counts as kept, and here it is
        assume(objective.weight.kept(tails[1].log(), tails[0].log(), torch.tensor(1.0)))
    repeated, rows = every_sampled_token(logits * temperature, batch, q_hat)
    expected_update = q_hat @ gradient(repeated, rows, objective, temperature)
    assert float(expected_update.abs().max()) <= 1e-12


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("y_in_head", [True, False])
def test_oracle_2_the_head_alone_gives_the_dense_gradient(reference, centred, y_in_head, sign):
    logits, batch = reference.random_batch(40, 60, 7, seed=3, mismatch=1.0, y_in_head=y_in_head)
    inside = (batch.candidate_ids == batch.target_ids[:, None]).any(1)
    assert bool((inside == y_in_head).all())
    batch = replace(batch, advantages=sign * batch.advantages.abs())
    error = gradient(logits, batch, centred) - reference.dense_gradient(logits, batch, centred)
    assert float(error.abs().max()) < 1e-14


def test_oracle_3_equal_distributions_need_no_correction(reference, centred):
    logits, batch = reference.random_batch(30, 50, 8, mismatch=0.0)
    log_p = logits.log_softmax(1)
    batch = replace(batch, sampler_logprobs=log_p.gather(1, batch.target_ids[:, None]).squeeze(1))
    plain = Objective("pg", False)
    assert torch.allclose(gradient(logits, batch, centred), gradient(logits, batch, plain), atol=1e-14)


def test_oracle_4_the_uncapped_ratio_centres_itself(reference):
    logits, batch = reference.random_batch(30, 50, 8, mismatch=2.0)
    result = policy_loss_from_logits(logits, batch, Objective("is", True, Importance()))
    assert float(result.terms.correction_abs.abs().max()) < 1e-15
    uncentred = gradient(logits, batch, Objective("is", False, Importance()))
    assert torch.allclose(gradient(logits, batch, Objective("is", True, Importance())), uncentred, atol=1e-14)


@pytest.mark.parametrize("mode", ["mis", "icepop"])
@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_oracle_5_a_masked_token_keeps_its_correction(reference, mode, shift):
    """y lies outside H and outside the band: its weight is 0, while −c_v of the head still acts."""
    objective = Objective("sc_mis", True, build_weight(mode, reference.bounds))
    logits, batch = reference.random_batch(30, 50, 8, mismatch=1.5, y_in_head=False)
    log_p = logits.log_softmax(1).gather(1, batch.target_ids[:, None]).squeeze(1)
    batch = unit(replace(batch, sampler_logprobs=log_p + shift))
    result = policy_loss_from_logits(logits, batch, objective)
    assert float(result.terms.weight.abs().max()) == 0
    assert float(result.sums["importance_masked_share"]) == 30
    correction_only = gradient(logits, batch, objective)
    assert float(correction_only.abs().max()) > 0.05
    assert torch.allclose(correction_only, reference.dense_gradient(logits, batch, objective), atol=1e-14)


def test_in_band_tokens_have_no_correction_under_tis_and_mis(reference):
    logits, batch = reference.random_batch(30, 50, 8, mismatch=0.05)
    for mode in ("tis", "mis", "icepop"):
        result = policy_loss_from_logits(logits, batch, Objective("sc", True, build_weight(mode, reference.bounds)))
        assert float(result.terms.correction_abs.max()) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_oracle_6_a_head_of_the_whole_vocabulary_is_exact(reference, centred, dtype):
    logits, batch = reference.random_batch(20, 31, 31, mismatch=0.7)
    error = gradient(logits.to(dtype), batch, centred).double() - reference.dense_gradient(logits, batch, centred)
    assert float(error.abs().max()) < 2e-6 * float((batch.advantages * batch.loss_weights).abs().max())


@pytest.mark.parametrize("sharpness", [3.0, 8.0, 30.0])
def test_oracle_6_tails_at_the_floor_stay_finite_within_the_tail_mass(reference, centred, sharpness):
    """Against the true q: the gradient differs by no more than what the tail could hold."""
    generator = torch.Generator().manual_seed(4)
    logits = sharpness * torch.randn(40, 64, generator=generator, dtype=torch.float64)
    log_q = (logits + 0.3 * torch.randn(40, 64, generator=generator, dtype=torch.float64)).log_softmax(1)
    head = log_q.topk(16, 1)
    rows = torch.zeros(40, dtype=torch.float64)
    batch = TokenBatch(
        head.indices[:, 0],
        head.values[:, 0].clamp(max=0),
        rows + 1,
        rows + 1,
        rows == 0,
        head.indices,
        head.values.clamp(max=0),
    )
    ours = gradient(logits, batch, centred)
    log_p = logits.log_softmax(1)
    everything = torch.arange(64).expand(40, 64)
    exact = gradient(logits, replace(batch, candidate_ids=everything, candidate_logprobs=log_q), centred)
    tail = (1 - head.values.exp().sum(1)) + (1 - log_p.exp().gather(1, head.indices).sum(1)) + 2e-6
    bound = 2 * max(reference.bounds.values()) * tail.clamp_min(0)
    assert bool(ours.isfinite().all())
    assert bool(((ours - exact).abs().sum(1) <= bound).all())


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
def test_oracle_7_masked_rows_may_hold_anything(reference, objective, poison):
    _, clean = reference.random_batch(12, 30, 5)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    kept = torch.arange(12) % 3 != 1
    dirty = replace(
        clean,
        mask=kept,
        target_ids=torch.where(kept, clean.target_ids, -100),
        sampler_logprobs=torch.where(kept, clean.sampler_logprobs, poison),
        advantages=torch.where(kept, clean.advantages, poison),
        loss_weights=torch.where(kept, clean.loss_weights, poison),
        candidate_ids=torch.where(kept[:, None], clean.candidate_ids, -1),
        candidate_logprobs=torch.where(kept[:, None], clean.candidate_logprobs, poison),
        old_logprobs=torch.where(kept, clean.sampler_logprobs, poison),
    )
    short = TokenBatch(**{field.name: getattr(dirty, field.name)[kept] for field in fields(dirty)})
    results = []
    for states, batch in ((torch.where(kept[:, None], hidden, poison), dirty), (hidden[kept], short)):
        states, head = states.clone().requires_grad_(), weight.clone().requires_grad_()
        result = policy_loss_from_hidden(states, head, batch, objective, chunk_size=5)
        result.loss.backward()
        results.append((result.loss.detach(), states.grad[batch.mask], head.grad, result.sums))
        assert bool(states.grad.isfinite().all()) and bool((states.grad[~batch.mask] == 0).all())
    (loss, states, head, sums), (short_loss, short_states, short_head, short_sums) = results
    assert torch.allclose(loss, short_loss, rtol=1e-13)
    assert torch.allclose(states, short_states, atol=1e-14) and torch.allclose(head, short_head, atol=1e-14)
    assert all(torch.allclose(sums[name], short_sums[name], rtol=1e-12) for name in sums)

    logits = torch.where(kept[:, None], hidden @ weight.T, poison).requires_grad_()
    result = policy_loss_from_logits(logits, dirty, objective)
    result.loss.backward()
    assert torch.allclose(result.loss.detach(), short_loss, rtol=1e-13)
    assert bool(logits.grad.isfinite().all()) and bool((logits.grad[~kept] == 0).all())


def test_a_batch_without_any_generated_token_is_zero(reference, objective):
    _, batch = reference.random_batch(7, 30, 5)
    batch = replace(batch, mask=torch.zeros(7, dtype=torch.bool))
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(30, 4, requires_grad=True)
    result = policy_loss_from_hidden(hidden, weight, batch, objective, chunk_size=3)
    result.loss.backward()
    assert result.loss.item() == 0
    assert float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0


def test_oracle_11_the_recorded_batch_is_left_alone(reference, objective):
    logits, batch = reference.random_batch(12, 30, 5)
    copies = {
        field.name: getattr(batch, field.name) for field in fields(batch) if getattr(batch, field.name) is not None
    }
    copies = {name: value.clone() for name, value in copies.items()}
    first, second = gradient(logits, batch, objective), gradient(logits, batch, objective)
    assert torch.equal(first, second)
    assert all(torch.equal(getattr(batch, name), value) for name, value in copies.items())


# Oracle 12. Half of the positions have Gaussian logits of standard deviation 8, half the probabilities rank^−1.6 in
# random order; the sampler's logits are the trainer's plus Gaussian noise. Then the mean head mass at K = 128 is 0.98.
POSITIONS, VOCABULARY, GAUSSIAN_STD, ZIPF_EXPONENT = 32, 32_768, 8.0, 1.6


def synthetic_logits(mismatch):
    generator = torch.Generator().manual_seed(0)
    half = POSITIONS // 2
    gaussian = GAUSSIAN_STD * torch.randn(half, VOCABULARY, generator=generator, dtype=torch.float64)
    ranks = torch.rand(half, VOCABULARY, generator=generator).argsort(1).double() + 1
    trainer = torch.cat([gaussian, -ZIPF_EXPONENT * ranks.log()])
    return trainer, trainer + mismatch * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("mismatch", [0.1, 0.5])
def test_oracle_12_the_drift_that_is_left_follows_the_head_mass(mismatch):
    """Σ_y q_y ∇ℓ_y at A = 1 under the true q, as a share of the uncorrected drift, both in the 1-norm over logits."""
    logits, sampler_logits = synthetic_logits(mismatch)
    log_q = sampler_logits.log_softmax(1)
    drift = log_q.exp() - logits.softmax(1)
    rows = torch.ones(POSITIONS, dtype=torch.float64)
    left, head_mass = {}, {}
    for candidates in (8, 32, 128):
        head = log_q.topk(candidates, 1)
        batch = TokenBatch(head.indices[:, 0], head.values[:, 0], rows, rows, rows == 1, head.indices, head.values)
        plain = gradient(logits, batch, Objective("pg", False))
        correction = gradient(logits, batch, Objective("sc", True)) - plain
        left[candidates] = float((drift - correction).abs().sum() / drift.abs().sum())
        head_mass[candidates] = float(head.values.exp().sum(1).mean())
    assert head_mass[128] == pytest.approx(0.98, abs=0.005)
    assert 0.16 < left[8] < 0.19
    assert 0.06 < left[32] < 0.08
    assert 0.02 < left[128] < 0.035


@pytest.mark.parametrize("log_ratio", [50.0, 88.0, 89.0, 1000.0])
def test_uncapped_importance_is_finite_at_any_ratio(log_ratio):
    """float32's exp overflows above 88.7; what follows an infinite weight is NaN."""
    logits = torch.zeros(1, 4, requires_grad=True)
    log_p = torch.tensor([-torch.tensor(4.0).log().item()])
    batch = TokenBatch(
        target_ids=torch.tensor([1]),
        sampler_logprobs=log_p - log_ratio,
        advantages=torch.ones(1),
        loss_weights=torch.ones(1),
        mask=torch.ones(1, dtype=torch.bool),
    )
    result = policy_loss_from_logits(logits, batch, Objective("importance", False, Importance()))
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(logits.grad).all()
    assert result.terms.weight.item() == pytest.approx(
        torch.tensor(min(log_ratio, 60.0)).double().exp().item(), rel=1e-5
    )
