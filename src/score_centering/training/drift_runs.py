"""Training without a learning signal: every rollout has the same advantage, so the expected update is pure drift.

The sampler is either the trainer's own policy of the step in low precision (online), or that of the start for good
(frozen). Rewards are scored as always and recorded, but nothing learns from them.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from score_centering.precision import requantise
from score_centering.reward import Scorer
from score_centering.rollout import validate_all
from score_centering.settings.model import Drift, ScoreCentering
from score_centering.settings.stages import DriftStage
from score_centering.training.local import Inputs, LocalTrainer

Sampler = Literal["online", "frozen"]
Weights = dict[str, Tensor]
METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "k3_kl", "head_mass_sampler")


def centering_settings(centering: str, vocab_size: int) -> ScoreCentering:
    """The settings behind a name of `ways_to_center`."""
    if centering == "none":
        return ScoreCentering()
    k = vocab_size if centering == "exact" else int(centering.removeprefix("k"))
    return ScoreCentering(enabled=True, centering=True, top_logprobs_num=k)


def drift_run(
    stage: DriftStage, sampler: Sampler, centering: str, seed: int, inputs: Inputs, vocab_size: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """One run: its rows, step 0 first (the columns of figures.drift.DRIFT), and the FP32 weights at its checks as
    `<step>/<name>`."""
    runtime = stage.train.runtime
    torch.set_num_threads(runtime.threads)
    torch.manual_seed(seed)
    train = stage.train.model_copy(update={"score_centering": centering_settings(centering, vocab_size)})
    trainer = DriftTrainer(train, centering, seed, inputs)
    labels = {"sampler": sampler, "centering": centering, "seed": seed}
    kept: dict[str, Tensor] = {}
    with Scorer(runtime.reward_workers, runtime.reward_timeout_seconds) as scorer:
        rows = [labels | row for row in trainer.rows(stage.drift, sampler, kept, scorer)]
    trainer.engine.close()
    return rows, kept


class DriftTrainer(LocalTrainer):
    """A local trainer whose rewards teach nothing."""

    def rows(self, drift: Drift, sampler: Sampler, kept: dict[str, Tensor], scorer: Scorer) -> Iterator[dict[str, Any]]:
        """One row a step: where the weights are, what the update was, and every `check_every` steps the reward of the
        trainer's policy in the rollouts' precision; the weights of those steps are added to `kept`."""
        start = self._weights()
        self._sync(0)
        yield {"step": 0, "displacement": 0.0, "displacement_relative": 0.0} | self._check(0, scorer)
        fixed = requantise(self._model_weights(), self.listed)
        for step in range(1, drift.steps + 1):
            prompts = self._batch(step)
            if sampler == "frozen":
                self.engine.sync(fixed, 0)
            rollouts = self._generate(prompts, drift.n, step, greedy=False)
            validate_all(rollouts, self.vocab_size, self.top_logprobs)
            answers = [prompt.answer for prompt in prompts for _ in range(drift.n)]
            rewards = scorer.score(*self._texts(rollouts, answers)).rewards
            gains = torch.full((len(rollouts),), drift.advantage)
            metrics = self.updater.update(rollouts, gains, step)
            moved = _distance(self.masters.masters, start)
            row = {
                "step": step,
                "displacement": moved,
                "displacement_relative": moved / _length(start),
                "reward_rollouts": float(rewards.mean()),
                "truncated_share": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
                "response_length_mean": float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
                **{name: metrics.get(name) for name in METRICS},
            }
            due = step % drift.check_every == 0 or step == drift.steps
            if sampler == "online" or due:
                self._sync(step)
            if due:
                row |= self._check(step, scorer)
                kept |= {f"{step}/{name}": tensor for name, tensor in self._weights().items()}
            yield row

    def _check(self, step: int, scorer: Scorer) -> dict[str, float]:
        """Reward of the engine's weights on held-out prompts, sampled once and greedily once."""
        answers = [prompt.answer for prompt in self.validation_prompts]
        rewards = {}
        for name, greedy in (("reward_sampled", False), ("reward_greedy", True)):
            rollouts = self._generate(self.validation_prompts, 1, step, greedy)
            rewards[name] = float(scorer.score(*self._texts(rollouts, answers)).rewards.mean())
        return rewards

    def _weights(self) -> Weights:
        """A copy of the FP32 masters."""
        return {name: master.clone() for name, master in self.masters.masters.items()}

    def _model_weights(self) -> Weights:
        """A copy of the BF16 weights of the forward."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def _length(weights: Weights) -> float:
    return torch.stack([tensor.norm() for tensor in weights.values()]).norm().item()


def _distance(first: Weights, second: Weights) -> float:
    """Euclidean distance over all weights."""
    return _length({name: first[name] - second[name] for name in second})
