"""A float64 reference over the full vocabulary, written from the paper's formula with an explicit q̂, and random
batches."""

from types import SimpleNamespace

import pytest
import torch

from score_centering.objectives import WEIGHTS, Objective, TokenBatch, build_weight

RATIO_WEIGHTS = {
    "none": lambda r, w: torch.ones_like(r),
    "importance": lambda r, w: r,
    "tis": lambda r, w: r.clamp(max=w.tis_max),
    "mis": lambda r, w: r * ((r >= w.mis_min) & (r <= w.mis_max)),
    "icepop": lambda r, w: r * ((r >= 1 / w.mis_max) & (r <= w.mis_max)),
}
BOUNDS = {"tis_max": 2.0, "mis_min": 0.5, "mis_max": 5.0}


def ratio_weight(weight):
    """f(r) of a weight, by its name in the config."""
    (name,) = (name for name, kind in WEIGHTS.items() if kind is type(weight))
    return lambda r: RATIO_WEIGHTS[name](r, weight)


def implied_sampler(p, candidate_ids, candidate_logprobs):
    """q̂ (T, V) float64: the recorded q on the head, ρ·p outside it."""
    q = candidate_logprobs.double().exp()
    head_p = p.gather(1, candidate_ids.long())
    rho = (1 - q.sum(1)).clamp_min(1e-6) / (1 - head_p.sum(1)).clamp_min(1e-6)
    return (rho[:, None] * p).scatter(1, candidate_ids.long(), q)


def token_losses(logits, batch, objective, temperature=1.0):
    """ℓ (T,) float64 with gradient by autograd, from logits (T, V)."""
    log_p = torch.log_softmax(logits.double() / temperature, 1)
    log_p_y = log_p.gather(1, batch.target_ids[:, None]).squeeze(1)
    advantage = batch.advantages.double()
    if objective.clips:
        old = log_p_y.detach() if batch.old_logprobs is None else batch.old_logprobs.double()
        ratio = (log_p_y - old).exp()
        bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        return -torch.minimum(ratio * advantage, bounded * advantage)
    f = ratio_weight(objective.weight)
    omega = f((log_p_y - batch.sampler_logprobs.double()).exp().detach())
    score = omega * log_p_y
    if objective.centering:
        p = log_p.exp().detach()
        q_hat = implied_sampler(p, batch.candidate_ids, batch.candidate_logprobs)
        mass = torch.where(q_hat > 0, q_hat * f(p / q_hat), 0.0)
        score = score - torch.where(mass > 0, mass * log_p, 0.0).sum(1)
    return -advantage * score


def token_values(logits, batch, objective, temperature=1.0):
    """The value of ℓ (T,) float64 as the head-only formula states it; its gradient alone equals the dense one."""
    if not objective.centering:
        return token_losses(logits, batch, objective, temperature)
    log_p = torch.log_softmax(logits.double() / temperature, 1)
    f = ratio_weight(objective.weight)
    p, q = log_p.exp().gather(1, batch.candidate_ids.long()), batch.candidate_logprobs.double().exp()
    rho = (1 - q.sum(1)).clamp_min(1e-6) / (1 - p.sum(1)).clamp_min(1e-6)
    c = q * f(p / q) - (rho * f(1 / rho))[:, None] * p
    log_p_y = log_p.gather(1, batch.target_ids[:, None]).squeeze(1)
    omega = f((log_p_y - batch.sampler_logprobs.double()).exp())
    return -batch.advantages.double() * (omega * log_p_y - (c * p.log()).sum(1))


def dense_gradient(logits, batch, objective, temperature=1.0):
    """d Σ w·ℓ / d logits, (T, V) float64."""
    logits = logits.detach().double().requires_grad_()
    losses = token_losses(logits, batch, objective, temperature)
    (losses * batch.loss_weights.double() * batch.mask).sum().backward()
    return logits.grad


def random_batch(tokens, vocab, candidates, seed=0, mismatch=0.5, y_in_head=None, dtype=torch.float64):
    """Logits (T, V) of the trainer and a batch whose sampler is a perturbed copy; y is drawn from the sampler.

    The log-prob of a sampled token outside the head is that of q̂, as oracle 1 needs.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * normal(tokens, vocab)
    log_q = torch.log_softmax(logits + mismatch * normal(tokens, vocab), 1)
    head = log_q.topk(candidates, 1)
    p = torch.softmax(logits, 1)
    q_hat = implied_sampler(p, head.indices, head.values)
    drawn = q_hat.clone()
    if y_in_head is not None and candidates < vocab:
        inside = torch.zeros_like(drawn, dtype=torch.bool).scatter(1, head.indices, True)
        drawn = torch.where(inside == y_in_head, drawn, 0.0)
    target = torch.multinomial(drawn, 1, generator=generator)
    batch = TokenBatch(
        target_ids=target.squeeze(1),
        sampler_logprobs=q_hat.log().gather(1, target).squeeze(1).clamp(max=0).to(dtype),
        advantages=normal(tokens).to(dtype),
        loss_weights=torch.rand(tokens, generator=generator, dtype=torch.float64).add(0.1).div(tokens).to(dtype),
        mask=torch.ones(tokens, dtype=torch.bool),
        candidate_ids=head.indices.int(),
        candidate_logprobs=head.values.to(dtype),
    )
    return logits, batch


OBJECTIVES = {
    "grpo": Objective("grpo", False, clip_low=0.2, clip_high=0.3, reduction="seq-mean-token-mean"),
    "sc": Objective("sc", True),
    "sc_tis": Objective("sc_tis", True, build_weight("tis", BOUNDS)),
    "sc_mis": Objective("sc_mis", True, build_weight("mis", BOUNDS)),
    "sc_icepop": Objective("sc_icepop", True, build_weight("icepop", BOUNDS | {"mis_max": 2.0})),
    "sc_importance": Objective("sc_importance", True, build_weight("importance", BOUNDS)),
    "grpo_mis": Objective("grpo_mis", False, build_weight("mis", BOUNDS)),
    "grpo_tis": Objective("grpo_tis", False, build_weight("tis", BOUNDS)),
    "pg": Objective("pg", False),
}


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(
        objectives=OBJECTIVES,
        token_losses=token_losses,
        token_values=token_values,
        dense_gradient=dense_gradient,
        implied_sampler=implied_sampler,
        random_batch=random_batch,
        f=RATIO_WEIGHTS,
        bounds=BOUNDS,
    )


@pytest.fixture(scope="session", params=sorted(OBJECTIVES))
def objective(request):
    return OBJECTIVES[request.param]


@pytest.fixture(scope="session", params=[name for name, entry in sorted(OBJECTIVES.items()) if entry.centering])
def centred(request):
    return OBJECTIVES[request.param]
