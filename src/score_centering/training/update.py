"""One update from one batch of rollouts: forward, objective, backward, optimiser."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from score_centering.objectives import (
    LossResult,
    Objective,
    add_sums,
    finalise_metrics,
    policy_loss_from_hidden,
    sequence_mean_weights,
    token_mean_weights,
)
from score_centering.rollout import Rollout
from score_centering.routing.replay import replaying
from score_centering.settings import UserError
from score_centering.settings.model import Actor
from score_centering.training.masters import MasterWeights
from score_centering.training.micro_batch import MicroBatch, make_micro_batch

Sums = dict[str, Tensor]


class Updater:
    """Applies updates to `model` through its `masters`."""

    def __init__(
        self,
        model: PreTrainedModel,
        masters: MasterWeights,
        objective: Objective,
        actor: Actor,
        temperature: float,
        nonfinite: str,
    ) -> None:
        self._model, self._masters, self._objective = model, masters, objective
        self._actor, self._temperature, self._nonfinite = actor, temperature, nonfinite

    def update(self, rollouts: Sequence[Rollout], advantages: Tensor, step: int) -> dict[str, float | None]:
        """All mini-batches and epochs of one step (numbered from 1), in the engine's order; returns metrics by column.

        Args:
            advantages: (N,) float32, one a rollout.

        Raises:
            UserError: a non-finite loss or gradient where the configuration says stop.
        """
        actor = self._actor
        passes = actor.mini_batches * actor.ppo_epochs
        old, sampled = (None, None) if passes == 1 else self._score(rollouts, advantages)
        parts = np.array_split(np.arange(len(rollouts)), actor.mini_batches) * actor.ppo_epochs
        norms, skipped, rate, totals = [], 0, actor.optim.lr, None
        for index, part in enumerate(parts):
            chosen = [rollouts[i] for i in part]
            sums = self._backward(chosen, advantages[part], old and [old[i] for i in part])
            loss, norm = sums["loss"].item(), self._masters.clip(actor.grad_clip)
            if np.isfinite(loss) and np.isfinite(norm):
                rate = self._masters.step((step - 1) * passes + index + 1)
                norms.append(norm)
                totals = add_sums(totals, sums)
            elif self._nonfinite == "stop":
                raise UserError(
                    f"step {step}: loss is {loss} and gradient norm {norm}; the last checkpoint is kept "
                    "(trainer.nonfinite: skip would leave such an update out)"
                )
            else:
                skipped += 1
                self._masters.drop_gradients()
        metrics = {} if totals is None else finalise_metrics(totals)
        if sampled is not None:
            metrics |= {name: value for name, value in finalise_metrics(sampled).items() if name in MISMATCH}
        return metrics | {
            "loss": metrics["loss"] / len(norms) if norms else None,
            "grad_norm": float(np.mean(norms)) if norms else None,
            "learning_rate": rate,
            "nonfinite_updates": skipped,
        }

    def _backward(self, rollouts: Sequence[Rollout], advantages: Tensor, old: Sequence[Tensor] | None) -> Sums:
        totals = None
        for batch in self._micro_batches(rollouts, advantages, old):
            result = self._loss(batch)
            result.loss.backward()
            self._masters.collect()
            totals = add_sums(totals, result.sums)
        return totals

    @torch.no_grad()
    def _score(self, rollouts: Sequence[Rollout], advantages: Tensor) -> tuple[list[Tensor], Sums]:
        """Old-policy log-probs of each rollout and the metric sums, before the first of several updates."""
        logprobs, totals = [], None
        for batch in self._micro_batches(rollouts, advantages, None):
            result = self._loss(batch)
            logprobs.append(result.logprobs)
            totals = add_sums(totals, result.sums)
        return list(torch.cat(logprobs).split([len(rollout.token_ids) for rollout in rollouts])), totals

    def _loss(self, batch: MicroBatch) -> LossResult:
        with replaying(self._model, batch.routes):
            hidden = self._model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        predicting = hidden.flatten(0, 1)[batch.hidden_index]
        weight = self._model.lm_head.weight
        return policy_loss_from_hidden(predicting, weight, batch.tokens, self._objective, self._temperature)

    def _micro_batches(
        self, rollouts: Sequence[Rollout], advantages: Tensor, old: Sequence[Tensor] | None
    ) -> Iterator[MicroBatch]:
        """Micro-batches whose loss weights are those of all `rollouts` together."""
        lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
        tokens, size = int(lengths.sum()), self._actor.ppo_micro_batch_size_per_gpu
        for start in range(0, len(rollouts), size):
            part = slice(start, start + size)
            if self._objective.reduction == "token-mean":
                weights = token_mean_weights(lengths[part], tokens)
            else:
                weights = sequence_mean_weights(lengths[part], len(rollouts))
            yield make_micro_batch(rollouts[part], advantages[part], weights, self._model.device, old and old[part])


MISMATCH = (
    "k3_kl",
    "k1_kl",
    "abs_logprob_gap_mean",
    "abs_logprob_gap_max",
    "importance_ratio_max",
    "token_chi2",
    "k3_clamped_tokens",
)
"""Metrics of trainer against sampler: of the sampled policy, so of the old one when a step has several updates."""
