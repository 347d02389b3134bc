"""Training without a learning signal: every rollout has the same advantage, so the expected update is pure drift.

The sampler is either the trainer's own policy of the step in low precision (online), or that of the start for good
(frozen). Rewards are scored as always and recorded, but nothing learns from them.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from score_centering.model.sources import load_folder
from score_centering.precision import requantise
from score_centering.reward import Scorer
from score_centering.rollout import validate_all
from score_centering.settings.stages import DriftStage
from score_centering.settings.study_blocks import Drift
from score_centering.settings.training_blocks import ScoreCentering
from score_centering.training.local import LocalTrainer
from score_centering.training.task import Inputs, Task
from score_centering.training.transport import direct

Sampler = Literal["online", "frozen"]
Weights = dict[str, Tensor]
METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "k3_kl", "head_mass_sampler")


def centering_settings(centering: str, vocab_size: int) -> ScoreCentering:
    """The settings behind a name of `ways_to_center`."""
    if centering == "none":
        return ScoreCentering()
    k = vocab_size if centering == "exact" else int(centering.removeprefix("k"))
    return ScoreCentering(centering=True, top_logprobs_num=k)


def drift_run(
    stage: DriftStage, sampler: Sampler, centering: str, seed: int, inputs: Inputs, vocab_size: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """One run: its rows, step 0 first (the columns of figures.drift.DRIFT), and the FP32 weights at its checks as
    `<step>/<name>`."""
    runtime = stage.train.runtime
    torch.set_num_threads(runtime.threads)
    torch.manual_seed(seed)
    train = stage.train.model_copy(update={"score_centering": centering_settings(centering, vocab_size)})
    model, tokenizer = load_folder(inputs.model_folder)
    task = Task(train, seed, inputs, tokenizer, vocab_size)
    trainer = LocalTrainer(train, centering, seed, inputs, model)
    labels = {"sampler": sampler, "centering": centering, "seed": seed}
    with Scorer(runtime.reward_workers, runtime.reward_timeout_seconds) as scorer:
        run = DriftRun(stage.drift, sampler, task, trainer, scorer)
        rows = [labels | row for row in run.rows()]
    trainer.engine.close()
    return rows, run.kept


class DriftRun:
    """The steps of one run. kept: the FP32 weights at its checks as `<step>/<name>`."""

    def __init__(self, drift: Drift, sampler: Sampler, task: Task, trainer: LocalTrainer, scorer: Scorer) -> None:
        self.drift, self.sampler, self.task, self.trainer, self.scorer = drift, sampler, task, trainer, scorer
        self.generate = direct(trainer.engine)
        self.kept: Weights = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a step: where the weights are, what the update was, and every `check_every` steps the reward of the
        trainer's policy in the rollouts' precision; the weights of those steps are added to `kept`."""
        drift, task, trainer = self.drift, self.task, self.trainer
        start = self._masters()
        trainer.sync(0)
        yield {"step": 0, "displacement": 0.0, "displacement_relative": 0.0} | self._check(0)
        fixed = requantise({name: value.clone() for name, value in trainer.weights().items()}, trainer.listed)
        for step in range(1, drift.steps + 1):
            prompts = task.prompts(step)
            if self.sampler == "frozen":
                trainer.engine.sync(fixed, 0)
            rollouts = self.generate(prompts, drift.n, task.sampling(), task.seed(step), task.top_logprobs)
            validate_all(rollouts, task.vocab_size, task.top_logprobs)
            rewards = task.score(self.scorer, rollouts, prompts).rewards
            metrics = trainer.update(rollouts, torch.full((len(rollouts),), drift.advantage), step)
            moved = _distance(trainer.masters.masters, start)
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
            if self.sampler == "online" or due:
                trainer.sync(step)
            if due:
                row |= self._check(step)
                self.kept |= {f"{step}/{name}": tensor for name, tensor in self._masters().items()}
            yield row

    def _check(self, step: int) -> dict[str, float]:
        """Reward of the engine's weights on held-out prompts, sampled once and greedily once."""
        task, prompts = self.task, self.task.validation
        rewards = {}
        for name, greedy in (("reward_sampled", False), ("reward_greedy", True)):
            candidates = 0 if greedy else task.top_logprobs
            rollouts = self.generate(prompts, 1, task.sampling(greedy), task.seed(step), candidates)
            rewards[name] = float(task.score(self.scorer, rollouts, prompts).rewards.mean())
        return rewards

    def _masters(self) -> Weights:
        """A copy of the FP32 masters."""
        return {name: master.clone() for name, master in self.trainer.masters.masters.items()}


def _length(weights: Weights) -> float:
    return torch.stack([tensor.norm() for tensor in weights.values()]).norm().item()


def _distance(first: Weights, second: Weights) -> float:
    """Euclidean distance over all weights."""
    return _length({name: first[name] - second[name] for name in second})
