"""The local trainer: one process, small, readable, exact.

A step generates rollouts with the low-precision engine, scores them, updates the FP32 masters through the BF16 model,
hands the requantised weights back to the engine, and records one row of metrics. Everything random in a step is a
function of (seed, step), so a resumed run repeats the steps it lost.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from score_centering.data import Problem
from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.model.sources import load_folder
from score_centering.objectives import advantages
from score_centering.precision import requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.reward import Scorer
from score_centering.rollout import LocalEngine, Rollout, Sampling, validate_all
from score_centering.runs import RunFolder, Stopwatch, peak_rss_bytes
from score_centering.runs.torch_state import restore_rng_state, rng_state
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.arm import arm_objective
from score_centering.training.loggers import showing
from score_centering.training.masters import MasterWeights
from score_centering.training.update import Updater


@dataclass(frozen=True)
class Inputs:
    """What a run reads: problems of both splits, the folder of the base weights, and the W8A8 config.json."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    model_folder: Path
    w8a8_config: Path | None


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    answer: str


def train(run: RunFolder, stage: TrainStage, arm: str, seed: int, inputs: Inputs) -> None:
    """Train one arm with one seed in the owned folder `run`, from its last checkpoint on, and publish the results.

    Raises:
        UserError: settings or inputs that can't be used, a non-finite update where the configuration says stop.
    """
    torch.set_num_threads(stage.runtime.threads)
    torch.manual_seed(seed)
    trainer = LocalTrainer(stage, arm, seed, inputs)
    with Scorer(stage.runtime.reward_workers, stage.runtime.reward_timeout_seconds) as scorer:
        trainer.run(run, scorer)
    run.publish(yaml.safe_dump(stage.model_dump(mode="json"), sort_keys=True), _run_info(run))
    trainer.engine.close()


class LocalTrainer:
    """The state of one training run; `run` goes through its steps."""

    def __init__(self, stage: TrainStage, arm: str, seed: int, inputs: Inputs) -> None:
        self.stage, self.arm, self.seed = stage, arm, seed
        self.model, self.tokenizer = load_folder(inputs.model_folder)
        self.model.to(stage.runtime.device).requires_grad_(True)
        if stage.runtime.device == "cpu":
            install_cpu_kernels(self.model)
        _check_candidates(stage, self.model.config.vocab_size)
        self.train_prompts = self._encode(inputs.train, "training")
        self.validation_prompts = self._encode(inputs.validation[: stage.data.val_batch_size], "validation")
        actor = stage.actor_rollout_ref.actor
        self.masters = MasterWeights(self.model, actor.optim)
        rollout = stage.actor_rollout_ref.rollout
        objective = arm_objective(stage, arm)
        self.updater = Updater(self.model, self.masters, objective, actor, rollout.temperature, stage.trainer.nonfinite)
        self.engine = _engine(stage, self.model.config, _w8a8_config(stage, inputs.w8a8_config))
        self.watch = Stopwatch()
        centering = stage.score_centering
        self.top_logprobs = centering.top_logprobs_num if centering.enabled else 0

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
                    self._checkpoint(run, step)
                if stopping and step < last:
                    run.stop(step)

    def _step(self, run: RunFolder, scorer: Scorer, step: int, show: Any) -> None:
        trainer, watch, n = self.stage.trainer, self.watch, self.stage.actor_rollout_ref.rollout.n
        started = datetime.now(UTC), time.monotonic()
        run.phase("rollout")
        with watch("rollout_s"):
            prompts = self._batch(step)
            rollouts = self._generate(prompts, n, step, greedy=False)
        validate_all(rollouts, self.model.config.vocab_size)
        run.phase("reward")
        with watch("reward_s"):
            scores = scorer.score(*self._texts(rollouts, [p.answer for p in prompts for _ in range(n)]))
            groups = np.repeat(np.arange(len(prompts)), n)
            rewards = torch.from_numpy(scores.rewards.astype(np.float64))
            gains = advantages(rewards, torch.from_numpy(groups), self.stage.algorithm.normalise)
        run.phase("update")
        with watch("update_s"):
            metrics = self.updater.update(rollouts, gains, step)
        run.phase("sync")
        with watch("sync_s"):
            self._sync(step)
        metrics |= _rollout_metrics(rollouts, rewards.numpy(), groups)
        metrics |= {"scorer_errors": scores.errors, "scorer_timeouts": scores.timeouts}
        if trainer.test_freq > 0 and (step % trainer.test_freq == 0 or step == trainer.total_training_steps):
            with watch("validation_s"):
                metrics |= self._validate(run, scorer)
        self._record(run, step, metrics, started, show)

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
        return self.engine.generate([prompt.ids for prompt in prompts], n, sampling, seed, top_logprobs)

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
            Prompt(tuple(encode_prompt(self.tokenizer, p.prompt, prompt.instruction, prompt.enable_thinking)), p.answer)
            for p in problems
        ]
        kept = [prompt for prompt in encoded if len(prompt.ids) <= limit]
        if not kept:
            raise UserError(f"data.max_prompt_length = {limit}: every {split} prompt is longer")
        if len(kept) < len(encoded):
            dropped = len(encoded) - len(kept)
            print(f"dropped {dropped} of {len(encoded)} {split} prompts: over {limit} tokens", file=sys.stderr)
        return kept

    def _sync(self, step: int) -> None:
        """Requantise the BF16 weights of the trainer's forward once and hand those bytes to the engine."""
        weights = {name: value.detach() for name, value in self.model.state_dict().items()}
        self.engine.sync(requantise(weights, self.engine.listed), step)

    def _resume(self, run: RunFolder) -> int | None:
        found = run.resume()
        if found is None:
            return None
        step, tensors, scalars = found
        self.masters.restore(tensors)
        restore_rng_state(tensors, scalars)
        return step

    def _checkpoint(self, run: RunFolder, step: int) -> None:
        with self.watch("checkpoint_s"):
            tensors, scalars = rng_state()
            run.save_checkpoint(step, self.masters.tensors() | tensors, scalars)


def _engine(stage: TrainStage, model_config: Any, w8a8_config: dict | None) -> LocalEngine:
    rollout = stage.actor_rollout_ref.rollout
    if rollout.name != "local":
        raise UserError(f"actor_rollout_ref.rollout.name = {rollout.name!r}: the local trainer drives the local engine")
    return LocalEngine(
        model_config,
        quantization=rollout.quantization,
        w8a8_config=w8a8_config,
        kv_cache=rollout.engine_kwargs.vllm.kv_cache_dtype,
        max_batch=rollout.max_num_seqs,
        max_prompt_length=stage.data.max_prompt_length,
        max_response_length=stage.data.max_response_length,
        device=stage.runtime.device,
    )


def _w8a8_config(stage: TrainStage, path: Path | None) -> dict | None:
    """The prepared W8A8 config.json, which lists the layers that the rollouts run in INT8; None for BF16 rollouts."""
    if stage.actor_rollout_ref.rollout.quantization is None:
        return None
    if path is None:
        raise UserError("INT8 rollouts need --w8a8-config (the config.json of the prepared W8A8 model)")
    return json.loads(path.read_text(encoding="utf-8"))


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
