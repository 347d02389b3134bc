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
)
from score_centering.objectives.metrics import ENTROPY_EDGES, POSITIONS
from score_centering.rollout import Rollout
from score_centering.routing.replay import replaying
from score_centering.settings import UserError
from score_centering.settings.training_blocks import Actor
from score_centering.training.drift_meter import DriftMeter
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
        meter: DriftMeter | None = None,
    ) -> None:
        self._model, self._masters, self._objective = model, masters, objective
        self._actor, self._temperature, self._nonfinite, self._meter = actor, temperature, nonfinite, meter

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
        norms, skipped, rate, totals, drift = [], 0, actor.optim.lr, None, {}
        meter = self._meter if self._meter is not None and self._meter.due(step) else None
        for index, part in enumerate(parts):
            chosen = [rollouts[i] for i in part]
            sums = self._backward(chosen, advantages[part], old and [old[i] for i in part], meter)
            loss, norm = sums["loss"].item(), self._masters.clip(actor.grad_clip)
            if meter is not None:
                drift, meter = meter.finish(norm), None
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
        return (
            metrics
            | drift
            | {
                "loss": metrics["loss"] / len(norms) if norms else None,
                "grad_norm": float(np.mean(norms)) if norms else None,
                "learning_rate": rate,
                "nonfinite_updates": skipped,
            }
        )

    @torch.no_grad()
    def forward(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """An update's forward over all `rollouts`: of each micro-batch which rollouts it holds, the states (T, D) that
        predict their generated tokens, and the tokens' log-probs (T,)."""
        for part, batch in self._micro_batches(rollouts, torch.zeros(len(rollouts)), None):
            hidden = self._hidden(batch)
            yield part, hidden, self._loss(hidden, batch).logprobs

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (T, D) → (T, V) float32, divided by the temperature."""
        return hidden.float() @ self._model.lm_head.weight.float().T / self._temperature

    def _backward(
        self,
        rollouts: Sequence[Rollout],
        advantages: Tensor,
        old: Sequence[Tensor] | None,
        meter: DriftMeter | None,
    ) -> Sums:
        totals = None
        for _, batch in self._micro_batches(rollouts, advantages, old):
            hidden = self._hidden(batch)
            if meter is not None:
                meter.collect(hidden, self._model.lm_head.weight, batch.tokens)
            result = self._loss(hidden, batch)
            result.loss.backward()
            self._masters.collect()
            totals = add_sums(totals, result.sums)
        return totals

    @torch.no_grad()
    def _score(self, rollouts: Sequence[Rollout], advantages: Tensor) -> tuple[list[Tensor], Sums]:
        """Old-policy log-probs of each rollout and the metric sums, before the first of several updates."""
        logprobs, totals = {}, None
        for part, batch in self._micro_batches(rollouts, advantages, None):
            result = self._loss(self._hidden(batch), batch)
            lengths = [len(rollouts[i].token_ids) for i in part]
            logprobs |= zip(part, result.logprobs.split(lengths), strict=True)
            totals = add_sums(totals, result.sums)
        return [logprobs[i] for i in range(len(rollouts))], totals

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """(T, D): the states that predict the generated tokens."""
        with replaying(self._model, batch.routes):
            hidden = self._model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[batch.hidden_index]

    def _loss(self, hidden: Tensor, batch: MicroBatch) -> LossResult:
        weight = self._model.lm_head.weight
        return policy_loss_from_hidden(hidden, weight, batch.tokens, self._objective, self._temperature)

    def _micro_batches(
        self, rollouts: Sequence[Rollout], advantages: Tensor, old: Sequence[Tensor] | None
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Micro-batches whose loss weights are those of all `rollouts` together, and which rollouts each one holds.

        The longest come first: rows of one forward are padded to the longest of them, so they should be alike.
        """
        lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
        order = np.argsort([-len(rollout.prompt_ids) - len(rollout.token_ids) for rollout in rollouts], kind="stable")
        tokens, size = int(lengths.sum()), self._actor.ppo_micro_batch_size_per_gpu
        for start in range(0, len(rollouts), size):
            part = order[start : start + size].tolist()
            weights = self._objective.loss_weights(lengths[part], tokens, len(rollouts))
            chosen, chosen_old = [rollouts[i] for i in part], old and [old[i] for i in part]
            yield part, make_micro_batch(chosen, advantages[part], weights, self._model.device, chosen_old)


MISMATCH = (
    "k3_kl",
    "k1_kl",
    "abs_logprob_gap_mean",
    "abs_logprob_gap_max",
    "importance_ratio_mean",
    "importance_ratio_p99",
    "effective_sample_share",
    "importance_ratio_max",
    *(f"k3_kl_position_{i + 1}" for i in range(POSITIONS)),
    *(f"k3_kl_entropy_{i + 1}" for i in range(len(ENTROPY_EDGES) + 1)),
    "token_chi2",
    "k3_clamped_tokens",
)
"""Metrics of trainer against sampler: of the sampled policy, so of the old one when a step has several updates."""
