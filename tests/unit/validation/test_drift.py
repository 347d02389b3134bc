"""The exact drift against dense autograd, which shares no formula with it."""

import pytest
import torch

from score_centering.objectives import Objective, TokenBatch, policy_loss_from_hidden
from score_centering.validation.drift import drift_logits, drift_norms, head_name, parameter_drift_norms, shares

VOCABULARY, POSITIONS, WIDTH = 23, 7, 5


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    noise = 0.3 * torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64, generator=generator)
    log_q = (hidden @ weight.T + noise).detach().log_softmax(-1)
    return hidden, weight, log_q


def bias_by_enumeration(hidden, weight, log_q, k, temperature):
    """(1/T) Σ_t Σ_y q_y · [log p_y − Σ_{v∈H} sg(q_v − ρ p_v) log p_v]: the SC loss at A = −1, averaged over y."""
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    total = 0
    for t in range(POSITIONS):
        q, p = log_q[t].exp(), log_p[t].exp().detach()
        head = sorted(range(VOCABULARY), key=lambda v: -q[v].item())[:k]
        correction = 0
        if k:
            rho = max(1 - q[head].sum().item(), 1e-6) / max(1 - p[head].sum().item(), 1e-6)
            correction = sum((q[v] - rho * p[v]) * log_p[t, v] for v in head)
        for y in range(VOCABULARY):
            total = total + q[y] * (log_p[t, y] - correction)
    return total / POSITIONS, log_p.detach()


@pytest.mark.parametrize("k", [0, 1, 4, VOCABULARY])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_norms_equal_dense_autograd(problem, k, temperature):
    hidden, weight, log_q = problem
    bias, log_p = bias_by_enumeration(hidden, weight, log_q, k, temperature)
    by_weight, by_hidden = torch.autograd.grad(bias, (weight, hidden))
    norms = drift_norms(log_p, log_q, hidden.detach(), weight.detach(), [k] if k else [], temperature, chunk=3)
    name = f"k{k}" if k else "uncentered"
    # a position's hidden-state gradient holds 1/T of the mean, so their sum is the mean bias
    assert norms[f"drift.lm_head.{name}"] == pytest.approx(by_weight.norm().item(), rel=1e-9, abs=1e-12)
    assert norms[f"drift.hidden.{name}"] == pytest.approx(by_hidden.sum(0).norm().item(), rel=1e-9, abs=1e-12)


def test_no_mismatch_no_drift():
    log_p = torch.randn(4, 9, dtype=torch.float64).log_softmax(-1)
    for k in (0, 3, 9):
        assert drift_logits(log_p, log_p, k).abs().max() < 1e-12


def test_the_whole_vocabulary_leaves_nothing_but_the_tail_floor(problem):
    hidden, weight, log_q = problem
    log_p = (hidden @ weight.T).detach().log_softmax(-1)
    assert drift_logits(log_p, log_q, VOCABULARY).abs().max() < 2e-6


def test_centering_shrinks_the_drift_with_the_head(problem):
    hidden, weight, log_q = problem
    log_p = (hidden @ weight.T).detach().log_softmax(-1)
    norms = drift_norms(log_p, log_q, hidden.detach(), weight.detach(), [4, 16])
    assert norms["drift_share.lm_head.k16"] < norms["drift_share.lm_head.k4"] < 1


def test_parameter_norms_equal_the_formula_whatever_the_batches(problem):
    hidden, weight, log_q = problem
    head_sizes = [4, VOCABULARY]
    log_p = (hidden @ weight.T).log_softmax(-1)
    formula = drift_norms(log_p.detach(), log_q, hidden.detach(), weight.detach(), head_sizes)
    for split in (1, 3, POSITIONS):
        rows = torch.arange(POSITIONS).split(split)
        pairs = (((hidden[r] @ weight.T).log_softmax(-1), log_q[r]) for r in rows)
        norms = parameter_drift_norms(pairs, [weight], head_sizes)
        for name in ("uncentered", "k4"):
            assert norms[f"drift.parameters.{name}"] == pytest.approx(formula[f"drift.lm_head.{name}"], rel=1e-9)
        assert norms["drift_share.parameters.k4"] == pytest.approx(formula["drift_share.lm_head.k4"], rel=1e-9)
        assert norms[f"drift.parameters.k{VOCABULARY}"] < 1e-5


def test_share_of_no_drift_is_zero():
    assert shares({"drift.hidden.uncentered": 0.0, "drift.hidden.k8": 0.0}) == {"drift_share.hidden.k8": 0.0}


@pytest.mark.parametrize("k", [0, 4])
def test_the_drift_is_what_the_objective_does_to_a_constant_advantage(problem, k):
    """E_q of the policy loss's gradient at A = 1, summed over every token that could have been sampled."""
    hidden, weight, log_q = problem
    head = log_q.topk(max(k, 1), dim=-1)
    per_token = {"dim": 0, "repeats": VOCABULARY}
    batch = TokenBatch(
        target_ids=torch.arange(VOCABULARY).repeat(POSITIONS),
        sampler_logprobs=log_q.flatten(),
        advantages=torch.ones(POSITIONS * VOCABULARY, dtype=torch.float64),
        loss_weights=log_q.exp().flatten() / POSITIONS,
        mask=torch.ones(POSITIONS * VOCABULARY, dtype=torch.bool),
        candidate_ids=head.indices.repeat_interleave(**per_token) if k else None,
        candidate_logprobs=head.values.repeat_interleave(**per_token) if k else None,
    )
    objective = Objective("sc", centering=bool(k))
    loss = policy_loss_from_hidden(hidden.repeat_interleave(**per_token), weight, batch, objective, 1.0).loss
    (by_weight,) = torch.autograd.grad(loss, weight)
    log_p = (hidden @ weight.T).detach().log_softmax(-1)
    norms = drift_norms(log_p, log_q, hidden.detach(), weight.detach(), [k] if k else [])
    assert norms[f"drift.lm_head.{head_name(k)}"] == pytest.approx(by_weight.norm().item(), rel=1e-9)
