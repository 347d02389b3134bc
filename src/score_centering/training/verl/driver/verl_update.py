"""One update from one batch of rollouts, on verl's workers: what `training.update` is to the local trainer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils

from score_centering.objectives import add_sums, finalise_metrics
from score_centering.rollout import Rollout
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.drift_meter import due
from score_centering.training.update import MISMATCH
from score_centering.training.verl.driver.update_batch import to_tensordict
from score_centering.training.verl.driver.verl_config import micro_batch_size
from score_centering.training.verl.worker.loss_head import DRIFT, DRIFT_STEP, LOGPROBS, SUMS


class VerlUpdater:
    """Applies updates through a worker group, whose ranks hold model and optimiser."""

    def __init__(self, workers: Any, stage: TrainStage) -> None:
        self._workers = workers
        self._actor, self._nonfinite = stage.actor_rollout_ref.actor, stage.trainer.nonfinite
        self._drift_freq = stage.trainer.drift_freq
        self._temperature = stage.actor_rollout_ref.rollout.temperature

    def update(self, rollouts: Sequence[Rollout], advantages: Tensor, step: int) -> dict[str, float | None]:
        """As `training.update.Updater.update`; with several ranks, each takes its share of every mini-batch."""
        actor = self._actor
        passes = actor.mini_batches * actor.ppo_epochs
        old, sampled = (None, None) if passes == 1 else self._score(rollouts, advantages)
        rows = len(rollouts) // actor.mini_batches
        settings = {"mini_batch_size": rows, "epochs": actor.ppo_epochs} | self._engine_settings(rows)
        if due(step, self._drift_freq):
            settings[DRIFT_STEP] = step
        data = to_tensordict(rollouts, advantages, old, **settings)
        output = tensordict_utils.get(self._workers.update_actor(data), "metrics")
        norms = np.atleast_1d(output["grad_norm"])
        finite = np.isfinite(norms)
        if not finite.all() and self._nonfinite == "stop":
            raise UserError(
                f"step {step}: gradient norm is {norms[~finite][0]}; the last checkpoint is kept "
                "(trainer.nonfinite: skip would leave such an update out)"
            )
        totals = _totals(output[SUMS], finite)
        metrics = {} if totals is None else finalise_metrics(totals)
        if sampled is not None:
            metrics |= {name: value for name, value in finalise_metrics(sampled).items() if name in MISMATCH}
        drift = output[DRIFT][0] if DRIFT in output else {}
        return (
            metrics
            | drift
            | {
                "loss": metrics["loss"] / int(finite.sum()) if totals else None,
                "grad_norm": float(norms[finite].mean()) if totals else None,
                "learning_rate": float(np.atleast_1d(output["lr"])[-1]),
                "nonfinite_updates": int((~finite).sum()),
            }
        )

    def _score(self, rollouts: Sequence[Rollout], advantages: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Old-policy log-probs of each rollout and the metric sums, before the first of several updates."""
        data = to_tensordict(rollouts, advantages, compute_loss=True, **self._engine_settings(len(rollouts)))
        output = self._workers.compute_log_prob(data)
        packed = tensordict_utils.get(output, LOGPROBS).unbind()
        old = [row[-len(r.token_ids) - 1 : -1].clone() for row, r in zip(packed, rollouts, strict=True)]
        ranks = tensordict_utils.get(output, "metrics")[SUMS]
        return old, _totals([part for rank in ranks for part in rank], np.array([True]))

    def _engine_settings(self, rows: int) -> dict[str, Any]:
        """Values that verl's engine reads beside the tensors; rows: of one update over all ranks."""
        size = micro_batch_size(rows // self._workers.world_size, self._actor.ppo_micro_batch_size_per_gpu)
        return {
            "temperature": self._temperature,
            "global_batch_size": rows,
            "micro_batch_size_per_gpu": size,
            "use_dynamic_bsz": False,
            "dataloader_kwargs": {"shuffle": False},
        }


def _totals(sums: Sequence[dict[str, float]], finite: np.ndarray) -> dict[str, Tensor] | None:
    """The sums of all micro-batches and ranks of the finite updates; `sums` lists them update by update."""
    size, totals = len(sums) // len(finite), None
    for index in np.flatnonzero(finite):
        for part in sums[index * size : (index + 1) * size]:
            totals = add_sums(totals, {name: torch.tensor(value, dtype=torch.float64) for name, value in part.items()})
    return totals
