"""The run loop of both trainers: generate, score, update, hand the weights on, and record one row of metrics a step.

Everything random in a step is a function of (seed, step), so a resumed run repeats the steps it lost.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from score_centering.data import Problem
from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.objectives import advantages
from score_centering.reward import Scorer
from score_centering.rollout import Rollout, Sampling, validate_all
from score_centering.runs import RunFolder, Stopwatch, peak_rss_bytes
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.loggers import showing
from score_centering.training.transport import Generate


@dataclass(frozen=True)
class Inputs:
    """What a run reads: problems of both splits, the folder of the base weights, and the W8A8 config.json."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    model_folder: Path
    w8a8_config: Path | None


@dataclass(frozen=True)
class Prompt:
    problem: str
    ids: tuple[int, ...]
    answer: str


class RunLoop(ABC):
    """The state of one training run; `run` goes through its steps.

    A trainer says how rollouts become an update, and how weights and state travel. `generate` asks its engine for
    rollouts, unless it is set to another way (`training.transport`).
    """

    generate: Generate

    def __init__(
        self,
        stage: TrainStage,
        arm: str,
        seed: int,
        inputs: Inputs,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
    ) -> None:
        self.stage, self.arm, self.seed = stage, arm, seed
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        _check_candidates(stage, vocab_size)
        self.train_prompts = self._encode(inputs.train, "training")
        self.validation_prompts = self._encode(inputs.validation[: stage.data.val_batch_size], "validation")
        self.watch = Stopwatch()
        centering = stage.score_centering
        self.top_logprobs = centering.top_logprobs_num if centering.enabled else 0

    @abstractmethod
    def _update(self, rollouts: Sequence[Rollout], gains: Tensor, step: int) -> dict[str, Any]:
        """All updates of one step; metrics by column. gains: (N,) float32 advantages."""

    @abstractmethod
    def _sync(self, step: int) -> None:
        """Hand the weights after update `step` to the rollout engine."""

    @abstractmethod
    def _resume(self, run: RunFolder) -> int | None:
        """Go back to the last checkpoint; its step, None when training starts at the beginning."""

    @abstractmethod
    def _checkpoint(self, run: RunFolder, step: int) -> None:
        """Save everything that shapes the next step."""

    def run(self, run: RunFolder, scorer: Scorer) -> None:
        """All steps that are left; validates, records and checkpoints when due."""
        trainer = self.stage.trainer
        last = trainer.total_training_steps
        done = self._resume(run)
        self._sync(done or 0)
        with showing(self.stage, self.arm, self.seed, done or 0, run) as show:
            if done is None and trainer.val_before_train and trainer.test_freq > 0:
                started = datetime.now(UTC), time.monotonic()
                with self.watch("validation_s"):
                    metrics = self._validate(run, scorer)
                self._record(run, 0, metrics, started, show)
            for step in range((done or 0) + 1, last + 1):
                self._step(run, scorer, step, show)
                stopping = run.stop_requested
                due = trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == last)
                if due or (stopping and step < last):
                    with self.watch("checkpoint_s"):
                        self._checkpoint(run, step)
                if stopping and step < last:
                    run.stop(step)

    def publish(self, run: RunFolder) -> None:
        """Declare the results of a run that has gone through all its steps."""
        run.publish(yaml.safe_dump(self.stage.model_dump(mode="json"), sort_keys=True), _run_info(run))

    def _step(self, run: RunFolder, scorer: Scorer, step: int, show: Any) -> None:
        trainer, watch, n = self.stage.trainer, self.watch, self.stage.actor_rollout_ref.rollout.n
        started = datetime.now(UTC), time.monotonic()
        run.phase("rollout")
        with watch("rollout_s"):
            prompts = self._batch(step)
            rollouts = self._generate(prompts, n, step, greedy=False)
        validate_all(rollouts, self.vocab_size, self.top_logprobs)
        run.phase("reward")
        with watch("reward_s"):
            scores = scorer.score(*self._texts(rollouts, [p.answer for p in prompts for _ in range(n)]))
            groups = np.repeat(np.arange(len(prompts)), n)
            rewards = torch.from_numpy(scores.rewards.astype(np.float64))
            gains = self._advantages(rewards, torch.from_numpy(groups), step)
        run.phase("update")
        with watch("update_s"):
            metrics = self._update(rollouts, gains, step)
        run.phase("sync")
        with watch("sync_s"):
            self._sync(step)
        metrics |= _rollout_metrics(rollouts, rewards.numpy(), groups)
        metrics |= {"scorer_errors": scores.errors, "scorer_timeouts": scores.timeouts}
        if trainer.test_freq > 0 and (step % trainer.test_freq == 0 or step == trainer.total_training_steps):
            with watch("validation_s"):
                metrics |= self._validate(run, scorer)
        self._record(run, step, metrics, started, show)

    def _advantages(self, rewards: Tensor, groups: Tensor, step: int) -> Tensor:
        try:
            return advantages(rewards, groups, self.stage.algorithm.normalise)
        except ValueError as error:
            raise UserError(f"step {step}: {error}; the last checkpoint is kept") from None

    def _record(
        self, run: RunFolder, step: int, metrics: dict[str, Any], started: tuple[datetime, float], show: Any
    ) -> None:
        timing: dict[str, Any] = self.watch.lap()
        timing |= {"started_at": started[0], "step_s": time.monotonic() - started[1]}
        timing["peak_rss_bytes"] = peak_rss_bytes()
        if "generated_tokens" in metrics:
            timing["tokens_per_s"] = metrics["generated_tokens"] / timing["rollout_s"]
        run.record_step(step, metrics, timing)
        show(step, metrics, timing)

    def _validate(self, run: RunFolder, scorer: Scorer) -> dict[str, float]:
        """Greedy decoding of the validation prompts, in the rollouts' own precision."""
        run.phase("validation")
        rollouts = self._generate(self.validation_prompts, 1, 0, greedy=True)
        rewards = scorer.score(*self._texts(rollouts, [prompt.answer for prompt in self.validation_prompts])).rewards
        return {
            "val_reward_mean": float(rewards.mean()),
            "val_response_length_mean": float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
            "val_truncated_share": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        }

    def _generate(self, prompts: Sequence[Prompt], n: int, step: int, greedy: bool) -> list[Rollout]:
        rollout = self.stage.actor_rollout_ref.rollout
        sampling = Sampling(
            temperature=rollout.temperature,
            max_tokens=self.stage.data.max_response_length,
            greedy=greedy,
            stop_token_ids=stop_token_ids(self.tokenizer),
        )
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint32)[0])
        top_logprobs = 0 if greedy else self.top_logprobs
        problems, ids = [prompt.problem for prompt in prompts], [prompt.ids for prompt in prompts]
        return self.generate(problems, ids, n, sampling, seed, top_logprobs)

    def _texts(self, rollouts: Sequence[Rollout], answers: Sequence[str]) -> tuple[list[str], list[str], list[bool]]:
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        return texts, list(answers), [rollout.finish_reason == "length" for rollout in rollouts]

    def _batch(self, step: int) -> list[Prompt]:
        """The prompts of `step`: consecutive pieces of a fresh permutation for every epoch."""
        size, count = self.stage.data.train_batch_size, len(self.train_prompts)
        positions = np.arange((step - 1) * size, step * size)
        orders = {
            e: np.random.default_rng([self.seed, int(e)]).permutation(count) for e in np.unique(positions // count)
        }
        return [self.train_prompts[orders[position // count][position % count]] for position in positions]

    def _encode(self, problems: Sequence[Problem], split: str) -> list[Prompt]:
        prompt, limit = self.stage.prompt, self.stage.data.max_prompt_length
        encoded = [
            Prompt(
                problem=p.prompt,
                ids=tuple(encode_prompt(self.tokenizer, p.prompt, prompt.instruction, prompt.enable_thinking)),
                answer=p.answer,
            )
            for p in problems
        ]
        kept = [prompt for prompt in encoded if len(prompt.ids) <= limit]
        if not kept:
            raise UserError(f"data.max_prompt_length = {limit}: every {split} prompt is longer")
        if len(kept) < len(encoded):
            dropped = len(encoded) - len(kept)
            print(f"dropped {dropped} of {len(encoded)} {split} prompts: over {limit} tokens", file=sys.stderr)
        return kept


def _check_candidates(stage: TrainStage, vocab_size: int) -> None:
    k = stage.score_centering.top_logprobs_num
    if stage.score_centering.enabled and k > vocab_size:
        raise UserError(f"score_centering.top_logprobs_num = {k} exceeds the model's vocabulary of {vocab_size} tokens")


def _rollout_metrics(rollouts: Sequence[Rollout], rewards: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    by_group = rewards.reshape(groups[-1] + 1, -1)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)),
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated_share": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "generated_tokens": int(lengths.sum()),
        "zero_variance_group_share": float((by_group == by_group[:, :1]).all(axis=1).mean()),
    }


def _run_info(run: RunFolder) -> dict[str, Any]:
    """Metrics of every step, so that a gate can judge a run from its run.json alone."""
    return {"metrics": [{"step": record["step"], **record["metrics"]} for record in run.records()]}
