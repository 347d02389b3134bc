"""The update against a dense float64 reference, and its invariance to how a batch is split."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from score_centering.objectives import build_objective
from score_centering.rollout import Rollout
from score_centering.settings import UserError
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.masters import MasterWeights
from score_centering.training.micro_batch import make_micro_batch
from score_centering.training.update import Updater
from tiny_model import tiny_model, tiny_rollouts

ARMS = {
    "grpo": dict(policy_loss="ppo", centering=False, is_mode="none", loss_agg_mode="seq-mean-token-mean"),
    "sc": dict(policy_loss="score_centering", centering=True, is_mode="none", loss_agg_mode="token-mean"),
    "sc_tis": dict(policy_loss="score_centering", centering=True, is_mode="tis", loss_agg_mode="token-mean"),
    "grpo_mis": dict(policy_loss="score_centering", centering=False, is_mode="mis", loss_agg_mode="token-mean"),
}


def objective(arm: str):
    return build_objective(
        arm, **ARMS[arm], tis_max=2.0, mis_min=0.5, mis_max=5.0, clip_ratio_low=0.2, clip_ratio_high=0.3
    )


def updater(net, arm: str, **actor) -> Updater:
    options = Actor(
        optim=Optim(name="sgd", lr=1.0), grad_clip=None, ppo_micro_batch_size_per_gpu=actor.pop("micro", 64), **actor
    )
    return Updater(net, MasterWeights(net, options.optim), objective(arm), options, 1.0, "stop")


def dense_loss(net, arm: str, batch: list[Rollout], advantages: torch.Tensor) -> torch.Tensor:
    """Straight from algorithm.md, one rollout at a time, over the full vocabulary in float64."""
    total = 0.0
    tokens = sum(len(r.token_ids) for r in batch)
    for rollout, advantage in zip(batch, advantages.double(), strict=True):
        ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.token_ids]))[None].long()
        logp = net(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        rows = logp[len(rollout.prompt_ids) - 1 : -1]
        y = torch.from_numpy(rollout.token_ids).long()
        log_p = rows.gather(1, y[:, None])[:, 0]
        q_y = torch.from_numpy(rollout.logprobs).double()
        ratio = (log_p.detach() - q_y).exp()
        weight = torch.ones_like(ratio) if arm == "grpo" else _f(arm, ratio)
        score = weight * log_p
        if ARMS[arm]["centering"]:
            head = torch.from_numpy(rollout.candidate_ids).long()
            q = torch.from_numpy(rollout.candidate_logprobs).double().exp()
            log_head = rows.gather(1, head)
            p = log_head.detach().exp()
            rho = (1 - q.sum(1)).clamp_min(1e-6) / (1 - p.sum(1)).clamp_min(1e-6)
            alpha = rho * _f(arm, 1 / rho)
            score = score - ((q * _f(arm, p / q) - alpha[:, None] * p) * log_head).sum(1)
        scale = 1 / tokens if ARMS[arm]["loss_agg_mode"] == "token-mean" else 1 / (len(batch) * len(y))
        total = total - advantage * score.sum() * scale
    return total


def _f(arm: str, r: torch.Tensor) -> torch.Tensor:
    mode = ARMS[arm]["is_mode"]
    if mode == "tis":
        return r.clamp_max(2.0)
    return r * ((r >= 0.5) & (r <= 5.0)) if mode == "mis" else torch.ones_like(r)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("micro", [64, 4, 1])
def test_sgd_step_is_the_dense_gradient(arm, micro):
    batch, advantages = tiny_rollouts(), torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])
    reference, trained = tiny_model(), tiny_model()
    dense_loss(reference, arm, batch, advantages).backward()
    metrics = updater(trained, arm, micro=micro).update(batch, advantages, step=1)
    for (name, before), after in zip(reference.named_parameters(), trained.parameters(), strict=True):
        expected = before.detach() - before.grad
        torch.testing.assert_close(after.detach(), expected, rtol=2e-4, atol=2e-5, msg=name)
    assert metrics["nonfinite_updates"] == 0
    assert metrics["learning_rate"] == 1.0


@pytest.mark.parametrize("epochs", [1, 2])  # two: old log-probs must come back to their own rollouts
@pytest.mark.parametrize("arm", ["grpo", "sc"])
def test_metrics_do_not_depend_on_the_split(arm, epochs):
    batch, advantages = tiny_rollouts(), torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])
    whole = updater(tiny_model(), arm, ppo_epochs=epochs).update(batch, advantages, step=1)
    split = updater(tiny_model(), arm, ppo_epochs=epochs, micro=1).update(batch, advantages, step=1)
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert split[name] == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), name


def test_a_forward_holds_rollouts_of_like_length():
    batch, widths = tiny_rollouts(), []
    lengths = sorted((len(r.prompt_ids) + len(r.token_ids) for r in batch), reverse=True)
    assert len(set(lengths)) > 2
    net = tiny_model()
    net.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    updater(net, "sc", micro=2).update(batch, torch.ones(6), step=1)
    assert widths == [(2, lengths[0]), (2, lengths[2]), (2, lengths[4])]


def test_k3_of_the_update_is_the_mean_over_generated_tokens():
    batch = tiny_rollouts()
    net = tiny_model()
    gaps = []
    for rollout in batch:
        ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.token_ids]))[None].long()
        logp = net(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
        y = torch.from_numpy(rollout.token_ids).long()
        gaps.append(logp.gather(1, y[:, None])[:, 0].detach() - torch.from_numpy(rollout.logprobs).double())
    d = torch.cat(gaps)
    metrics = updater(tiny_model(), "grpo").update(batch, torch.zeros(6), step=1)
    assert metrics["k3_kl"] == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-4)
    assert metrics["k1_kl"] == pytest.approx(-d.mean().item(), rel=1e-4)


def test_one_update_leaves_the_clip_inert_and_two_use_it():
    batch, advantages = tiny_rollouts(8), torch.tensor([3.0, -3.0] * 4)
    assert updater(tiny_model(), "grpo").update(batch, advantages, step=1)["clip_share"] == 0
    several = updater(tiny_model(), "grpo", mini_batches=2, ppo_epochs=2).update(batch, advantages, step=1)
    assert several["clip_share"] > 0
    once = updater(tiny_model(), "grpo").update(batch, advantages, step=1)
    assert several["k3_kl"] == pytest.approx(once["k3_kl"], rel=1e-5), "K3 is that of the policy that was sampled"


def test_records_are_never_changed_and_convert_twice_to_the_same_tensors():
    batch = tiny_rollouts()
    kept = [replace(r, logprobs=r.logprobs.copy(), candidate_logprobs=r.candidate_logprobs.copy()) for r in batch]
    tokens = sum(len(r.token_ids) for r in batch)
    first = make_micro_batch(batch, torch.ones(6), torch.ones(tokens), "cpu")
    updater(tiny_model(), "sc_tis").update(batch, torch.ones(6), step=1)
    second = make_micro_batch(batch, torch.ones(6), torch.ones(tokens), "cpu")
    for name in ("sampler_logprobs", "candidate_ids", "candidate_logprobs", "target_ids"):
        assert torch.equal(getattr(first.tokens, name), getattr(second.tokens, name))
    for before, after in zip(kept, batch, strict=True):
        assert np.array_equal(before.logprobs, after.logprobs)
        assert np.array_equal(before.candidate_logprobs, after.candidate_logprobs)


def test_non_finite_gradient_stops_or_skips():
    batch = tiny_rollouts()
    broken = tiny_model()
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"step 7: loss is nan.*trainer\.nonfinite: skip"):
        updater(broken, "sc").update(batch, torch.ones(6), step=7)
    skipping = updater(broken, "sc")
    skipping._nonfinite = "skip"
    weights = broken.lm_head.weight.detach().clone()
    metrics = skipping.update(batch, torch.ones(6), step=7)
    assert (metrics["nonfinite_updates"], metrics["loss"], metrics["grad_norm"]) == (1, None, None)
    assert torch.equal(broken.lm_head.weight.detach(), weights)


def test_a_skipped_update_is_left_out_of_every_metric_of_the_loss():
    """The first mini-batch is not finite: the numbers are those of the second alone, on weights that did not move."""
    batch, gains = tiny_rollouts(8), torch.tensor([float("nan")] * 4 + [1.0, -1.0, 0.5, 2.0])
    both = updater(tiny_model(), "sc", mini_batches=2)
    both._nonfinite = "skip"
    found = both.update(batch, gains, step=1)
    second = updater(tiny_model(), "sc").update(batch[4:], gains[4:], step=1)
    assert found["nonfinite_updates"] == 1 and second["nonfinite_updates"] == 0
    for name in ("loss", "grad_norm", "entropy", "advantage_abs_mean", "head_mass_trainer"):
        assert found[name] == pytest.approx(second[name], rel=1e-6), name


def test_the_loss_of_several_updates_is_their_mean():
    batch, gains = tiny_rollouts(8), torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 1.5, 1.0, 0.25])
    found = updater(tiny_model(), "sc", mini_batches=2).update(batch, gains, step=1)
    one = updater(tiny_model(), "sc")
    losses = [one.update(batch[part], gains[part], step=step)["loss"] for step, part in
              ((1, slice(4)), (2, slice(4, 8)))]  # fmt: skip
    assert found["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_the_warm_up_counts_every_update_of_a_step():
    """Two updates a step, full rate at the fourth: a step's rate is that of its last update."""
    options = Actor(
        optim=Optim(name="sgd", lr=1.0, lr_warmup_steps=4), grad_clip=None, ppo_micro_batch_size_per_gpu=64,
        mini_batches=2,
    )  # fmt: skip
    net, batch = tiny_model(), tiny_rollouts(8)
    made = Updater(net, MasterWeights(net, options.optim), objective("sc"), options, 1.0, "stop")
    rates = [made.update(batch, torch.zeros(8), step)["learning_rate"] for step in (1, 2, 3)]
    assert rates == [0.5, 1.0, 1.0]
