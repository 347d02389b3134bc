"""Where a run is shown while it goes on: the console and, on request, Weights & Biases and trackio.

The two get what `record_step` has recorded, under the names of verl's trainer, so that a run lies beside runs of other
trainers. They only read: the metrics log, the random generators and a run's identity know nothing of them. A step is
sent once; steps that a resumed run makes again are not sent again.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from score_centering.runs import RunFolder
from score_centering.runs.files import write_file
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.progress import progress

Send = Callable[[int, Mapping[str, float]], None]

# Columns of runs/schema.py whose quantity verl 0.8 logs too, and its name for it. Two are defined otherwise there: its
# perf/throughput counts prompts and divides by the whole step and the GPUs, its actor/entropy by loss_agg_mode.
VERL_NAMES = {
    "step": "training/global_step",
    "reward_mean": "critic/rewards/mean",
    "response_length_mean": "response_length/mean",
    "response_length_max": "response_length/max",
    "truncated_share": "response_length/clip_ratio",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "entropy": "actor/entropy",
    "clip_share": "actor/pg_clipfrac",
    "k3_kl": "rollout_corr/k3_kl",
    "k1_kl": "rollout_corr/kl",
    "token_chi2": "rollout_corr/chi2_token",
    "importance_weight_mean": "rollout_corr/rollout_is_mean",
    "importance_masked_share": "rollout_corr/rollout_is_oob_ratio",
    "val_reward_mean": "val-core/test/reward/mean@1",
    "rollout_s": "timing_s/gen",
    "reward_s": "timing_s/reward",
    "update_s": "timing_s/update_actor",
    "sync_s": "timing_s/update_weights",
    "validation_s": "timing_s/testing",
    "checkpoint_s": "timing_s/save_checkpoint",
    "step_s": "timing_s/step",
    "tokens_per_s": "perf/throughput",
}
# The others, in the sections of a dashboard where they belong.
OWN_NAMES = {
    "reward_std": "critic/rewards/std",
    "advantage_abs_mean": "critic/advantages/abs_mean",
    "zero_variance_group_share": "critic/rewards/zero_variance_group_share",
    "generated_tokens": "response_length/sum",
    "sampler_age": "rollout_corr/sampler_age",
    "nonfinite_updates": "actor/nonfinite_updates",
    "abs_logprob_gap_mean": "rollout_corr/abs_logprob_gap_mean",
    "abs_logprob_gap_max": "rollout_corr/abs_logprob_gap_max",
    "importance_ratio_max": "rollout_corr/importance_ratio_max",
    "importance_ratio_mean": "rollout_corr/importance_ratio_mean",
    "importance_ratio_p99": "rollout_corr/importance_ratio_p99",
    "effective_sample_share": "rollout_corr/effective_sample_share",
    "k3_clamped_tokens": "rollout_corr/k3_clamped_tokens",
    **{f"k3_kl_position_{i}": f"rollout_corr/k3_kl_position_{i}" for i in (1, 2, 3, 4)},
    **{f"k3_kl_entropy_{i}": f"rollout_corr/k3_kl_entropy_{i}" for i in (1, 2, 3, 4)},
    **{
        f"{name}_{sign}": f"rollout_corr/{name}_{sign}"
        for name in ("importance_masked_share", "clip_share")
        for sign in ("positive", "negative")
    },
    "drift_norm": "score_centering/drift_norm",
    "drift_share": "score_centering/drift_share",
    "drift_coherence": "score_centering/drift_coherence",
    "head_mass_sampler": "score_centering/head_mass_sampler",
    "head_mass_trainer": "score_centering/head_mass_trainer",
    "correction_abs_mean": "score_centering/correction_abs_mean",
    "scorer_errors": "reward/scorer_errors",
    "scorer_timeouts": "reward/scorer_timeouts",
    "clean_reward_mean": "val-core/test/clean_reward/mean@1",
    "val_response_length_mean": "val-aux/test/response_length/mean@1",
    "val_truncated_share": "val-aux/test/response_length/clip_ratio",
    "peak_rss_bytes": "perf/peak_rss_bytes",
    "started_at": "training/started_at",
}
NAMES = VERL_NAMES | OWN_NAMES


def named(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, float]:
    """The measured values of a step under `NAMES`; a time of day becomes Unix seconds."""
    values = {"step": step, **metrics, **timing}
    return {NAMES[column]: _number(value) for column, value in values.items() if value is not None}


def check(chosen: Sequence[str], smoke: bool) -> None:
    """Refuse loggers that can't work, before anything starts.

    Raises:
        UserError: one that is not installed, or any but the console for a smoke run.
    """
    for name in chosen:
        if name == "console":
            continue
        if smoke:
            raise UserError(f"trainer.logger: {name}: a smoke run is shown on the console only")
        try:
            version(name)
        except PackageNotFoundError:
            raise UserError(f"trainer.logger: {name} is not installed; pip install {name}, or leave it out") from None


@contextmanager
def showing(stage: TrainStage, arm: str, seed: int, first_step: int, run: RunFolder) -> Iterator[Any]:
    """Yields `show(step, metrics, timing)`, to be called once for each recorded step, for all of `trainer.logger`.

    Raises:
        UserError: a logger that can't be started, such as W&B without an account and not offline.
    """
    chosen = stage.trainer.logger
    about = _about(stage, arm, seed, run)
    with ExitStack() as stack:
        senders = [stack.enter_context(start(about)) for name, start in STARTS.items() if name in chosen]
        shows = [_sending_once(senders, run.state / "logged")] if senders else []
        if "console" in chosen:
            shows.append(stack.enter_context(progress(arm, first_step, stage.trainer.total_training_steps)))

        def show(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
            for one in shows:
                one(step, metrics, timing)

        yield show


@dataclass(frozen=True)
class About:
    """What a logger is told of a run: `project` and `name` are the same for every start of it."""

    project: str
    name: str
    run_id: str
    config: dict[str, Any]
    folder: Path


def _about(stage: TrainStage, arm: str, seed: int, run: RunFolder) -> About:
    """A run that is trained anew, after a finished one was archived, is another run: `sc-seed0-2`."""
    archive = run.state / "archive"
    finished = sum(1 for _ in archive.iterdir()) if archive.is_dir() else 0
    name = f"{arm}-seed{seed}" + (f"-{finished + 1}" if finished else "")
    project = f"score-centering-{stage.experiment}"
    config = {"arm": arm, "seed": seed, **stage.model_dump(mode="json")}
    return About(project, name, f"{stage.experiment}-{name}", config, run.state)


def _sending_once(senders: Sequence[Send], kept: Path) -> Callable[..., None]:
    """Sends each step to all `senders` unless `kept` says that it, or a later one, was sent by an earlier start."""
    last = int(kept.read_text(encoding="utf-8")) if kept.exists() else -1

    def show(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        if step <= last:
            return
        for send in senders:
            send(step, named(step, metrics, timing))
        write_file(kept, f"{step}\n".encode())

    return show


@contextmanager
def _wandb(about: About) -> Iterator[Send]:
    """A W&B run, the same at every start; its local files lie in the run's state unless WANDB_DIR says otherwise."""
    import wandb

    try:
        run = wandb.init(
            project=about.project,
            id=about.run_id,
            name=about.name,
            config=about.config,
            dir=os.environ.get("WANDB_DIR", about.folder),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise UserError(f"trainer.logger: wandb can't start: {' '.join(str(error).split())}") from None
    with run:
        yield lambda step, values: run.log(dict(values), step=step, commit=True)


@contextmanager
def _trackio(about: About) -> Iterator[Send]:
    """A trackio run, the same at every start, where trackio keeps its runs (TRACKIO_DIR)."""
    import trackio

    run = trackio.init(about.project, name=about.name, config=about.config, resume="allow", embed=False)
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        trackio.finish()


STARTS = {"wandb": _wandb, "trackio": _trackio}


def _number(value: Any) -> float:
    return value.timestamp() if isinstance(value, datetime) else value
