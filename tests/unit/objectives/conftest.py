"""A float64 reference over the full vocabulary, written from the paper's formula with an explicit q̂, and random
batches."""

import math
from types import SimpleNamespace

import pytest
import torch

from score_centering.objectives import WEIGHTS, Objective, TokenBatch, build_weight
from score_centering.objectives.weights import TrustRegion

BOUNDS = {
    "tis_max": 2.0, "mis_min": 0.5, "mis_max": 5.0, "kpop_max": 0.05, "dppo_max": 0.1, "cispo_min": 0.6,
    "cispo_max": 1.5, "geo_min": 0.9, "geo_max": 1.05, "opsm_max": 0.1, "gspo_low": 0.1, "gspo_high": 0.05,
}  # fmt: skip


def binary_kl(p, q):
    """D(p‖q) in nats of two coins."""
    return torch.special.xlogy(p, p / q) + torch.special.xlogy(1 - p, (1 - p) / (1 - q))


# f of one token, from p, q, the advantage and the bounds.
TOKEN_WEIGHTS = {
    "none": lambda p, q, a, w: torch.ones_like(p),
    "importance": lambda p, q, a, w: p / q,
    "tis": lambda p, q, a, w: (p / q).clamp(max=w.tis_max),
    "mis": lambda p, q, a, w: p / q * ((p / q >= w.mis_min) & (p / q <= w.mis_max)),
    "icepop": lambda p, q, a, w: p / q * ((p / q >= 1 / w.mis_max) & (p / q <= w.mis_max)),
    "kpop": lambda p, q, a, w: p / q * ((binary_kl(p, q) <= w.kpop_max) & (binary_kl(q, p) <= w.kpop_max)),
    "dppo_tv": lambda p, q, a, w: p / q * ~(((p - q).abs() > w.dppo_max) & (((a > 0) & (p > q)) | ((a < 0) & (p < q)))),
    "cispo": lambda p, q, a, w: (p / q).clamp(w.cispo_min, w.cispo_max),
}
# The weight of a rollout, from the ratios of its tokens, the advantage and the bounds.
ROLLOUT_WEIGHTS = {
    "seq_tis": lambda r, a, w: min(math.prod(r), w.tis_max),
    "seq_mis": lambda r, a, w: math.prod(r) if w.mis_min <= math.prod(r) <= w.mis_max else 0.0,
    "geo_mask": lambda r, a, w: float(w.geo_min <= math.prod(r) ** (1 / len(r)) <= w.geo_max),
    "opsm": lambda r, a, w: 0.0 if a < 0 and -math.log(math.prod(r)) / len(r) > w.opsm_max else 1.0,
    "gspo": lambda r, a, w: gspo(math.prod(r) ** (1 / len(r)), a, w),
}


def gspo(s, a, w):
    """d/ds of min(s·A, clip(s)·A), times s / A."""
    low, high = 1 - w.gspo_low, 1 + w.gspo_high
    return s if s * a <= min(max(s, low), high) * a else 0.0


def name_of(weight):
    (name,) = (name for name, kind in WEIGHTS.items() if kind is type(weight))
    return name


def sampled_weights(weight, p, batch):
    """ω (T,) float64 of the sampled tokens of probability p (T,)."""
    q, gains = batch.sampler_logprobs.double().exp(), batch.advantages.double()
    if name_of(weight) in TOKEN_WEIGHTS:
        return TOKEN_WEIGHTS[name_of(weight)](p, q, gains, weight)
    omega = torch.zeros_like(p)
    for row in range(len(p)):
        rollout = (batch.sequence_ids == batch.sequence_ids[row]) & batch.mask
        if batch.mask[row]:
            ratios = (p / q)[rollout].tolist()
            omega[row] = ROLLOUT_WEIGHTS[name_of(weight)](ratios, gains[row].item(), weight)
    return omega


def weighted_masses(weight, p, q_hat, candidate_ids, gains):
    """q̂·f(p, q̂) (T, V); what lies outside the head counts as kept in a trust region."""
    mass = q_hat * TOKEN_WEIGHTS[name_of(weight)](p, q_hat, gains[:, None], weight)
    mass = torch.where(q_hat > 0, mass, 0.0)
    if isinstance(weight, TrustRegion):
        outside = torch.ones_like(p, dtype=torch.bool).scatter(1, candidate_ids.long(), False)
        mass = torch.where(outside, p, mass)
    return mass


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
    omega = sampled_weights(objective.weight, log_p_y.exp().detach(), batch)
    score = omega * log_p_y
    if objective.centering:
        p = log_p.exp().detach()
        q_hat = implied_sampler(p, batch.candidate_ids, batch.candidate_logprobs)
        mass = weighted_masses(objective.weight, p, q_hat, batch.candidate_ids, advantage)
        score = score - torch.where(mass > 0, mass * log_p, 0.0).sum(1)
    return -advantage * score


def token_values(logits, batch, objective, temperature=1.0):
    """The value of ℓ (T,) float64 as the head-only formula states it; its gradient alone equals the dense one."""
    if not objective.centering:
        return token_losses(logits, batch, objective, temperature)
    log_p = torch.log_softmax(logits.double() / temperature, 1)
    f, gains = TOKEN_WEIGHTS[name_of(objective.weight)], batch.advantages.double()
    p, q = log_p.exp().gather(1, batch.candidate_ids.long()), batch.candidate_logprobs.double().exp()
    rho = (1 - q.sum(1)).clamp_min(1e-6) / (1 - p.sum(1)).clamp_min(1e-6)
    one = torch.ones_like(rho)
    alpha = one if isinstance(objective.weight, TrustRegion) else rho * f(one, rho, gains, objective.weight)
    c = q * f(p, q, gains[:, None], objective.weight) - alpha[:, None] * p
    log_p_y = log_p.gather(1, batch.target_ids[:, None]).squeeze(1)
    omega = sampled_weights(objective.weight, log_p_y.exp(), batch)
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
        sequence_ids=torch.arange(tokens) // 7,
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
    **{
        f"sc_{mode}": Objective(f"sc_{mode}", True, build_weight(mode, BOUNDS)) for mode in ("kpop", "dppo_tv", "cispo")
    },
    **{
        mode: Objective(mode, False, build_weight(mode, BOUNDS), reduction="seq-mean-token-mean")
        for mode in ("kpop", "dppo_tv", "cispo", *ROLLOUT_WEIGHTS)
    },
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
        f=TOKEN_WEIGHTS,
        bounds=BOUNDS,
    )


@pytest.fixture(scope="session", params=sorted(OBJECTIVES))
def objective(request):
    return OBJECTIVES[request.param]


@pytest.fixture(scope="session", params=[name for name, entry in sorted(OBJECTIVES.items()) if entry.centering])
def centred(request):
    return OBJECTIVES[request.param]
