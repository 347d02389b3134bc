"""The oracle of the drift study, through the real update: what the expected update of a frozen sampler is."""

from pathlib import Path

import numpy as np
import torch

from score_centering.model.sources import load_folder
from score_centering.objectives import build_objective
from score_centering.reward import Scorer
from score_centering.rollout import Rollout
from score_centering.settings import load_settings
from score_centering.settings.stages import DriftStage
from score_centering.settings.studies import ways_to_center
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.drift_runs import DriftRun, centering_settings
from score_centering.training.local import LocalTrainer
from score_centering.training.masters import MasterWeights
from score_centering.training.task import Task
from score_centering.training.update import Updater
from tiny_model import VOCABULARY, tiny_model

DEFAULT = Path(__file__).parents[3] / "config/config.yaml"


def expected_update(centering: bool, k: int, prompts: int = 3) -> float:
    """‖Σ_y q_y ∇ℓ_y‖ of one SGD step at `prompts` prefixes: every token y once, with the advantage V·q_y."""
    net = tiny_model()
    rng = np.random.default_rng(0)
    rollouts, advantages = [], []
    for index in range(prompts):
        logits = rng.normal(size=VOCABULARY) * 2
        q = np.exp(logits) / np.exp(logits).sum()
        head = np.argsort(-q)[:k].astype(np.int32)
        prompt = rng.integers(0, VOCABULARY, size=4).astype(np.int32)
        for token in range(VOCABULARY):
            rollouts.append(
                Rollout(
                    prompt_index=index,
                    sample_index=token,
                    prompt_ids=prompt,
                    token_ids=np.array([token], np.int32),
                    logprobs=np.log(q[[token]]).astype(np.float32),
                    candidate_ids=head[None] if centering else None,
                    candidate_logprobs=np.log(q[head])[None].astype(np.float32) if centering else None,
                    finish_reason="stop",
                )
            )
            advantages.append(VOCABULARY * q[token])
    objective = build_objective(
        "drift", policy_loss="score_centering", centering=centering, is_mode="none", tis_max=2.0, mis_min=0.5,
        mis_max=5.0, clip_ratio_low=0.2, clip_ratio_high=0.3, loss_agg_mode="token-mean",
    )  # fmt: skip
    options = Actor(optim=Optim(name="sgd", lr=1.0), grad_clip=None, ppo_micro_batch_size_per_gpu=64)
    updater = Updater(net, MasterWeights(net, options.optim), objective, options, 1.0, "stop")
    return updater.update(rollouts, torch.tensor(advantages, dtype=torch.float32), 1)["grad_norm"]


def test_the_exact_centered_update_of_a_frozen_sampler_is_zero_on_average():
    drift = expected_update(centering=False, k=VOCABULARY)
    assert drift > 0.1
    assert expected_update(centering=True, k=VOCABULARY) < 1e-4 * drift


def test_what_a_smaller_head_leaves():
    drift = expected_update(centering=False, k=VOCABULARY)
    left = [expected_update(centering=True, k=k) / drift for k in (4, 16, 32)]
    assert 1 > left[0] > left[1] > left[2] > 0
    assert left[2] < 0.1


def test_ways_to_center_are_settings():
    assert ways_to_center([8, 32]) == ["exact", "none", "k8", "k32"]
    found = {name: centering_settings(name, 512) for name in ways_to_center([8, 32])}
    assert [settings.centering for settings in found.values()] == [True, False, True, True]
    assert [found[name].top_logprobs_num for name in ("exact", "k8", "k32")] == [512, 8, 32]


def test_the_study_changes_the_optimiser_and_the_objective_alone():
    settings = load_settings([DEFAULT])
    stage = DriftStage.of(settings)
    actor = stage.train.actor_rollout_ref.actor
    assert (actor.optim, actor.policy_loss, actor.loss_agg_mode) == (
        stage.drift.optim, "score_centering", "token-mean",
    )  # fmt: skip
    assert stage.train.data.train_batch_size == stage.drift.train_batch_size
    assert stage.train.actor_rollout_ref.rollout.quantization == settings.actor_rollout_ref.rollout.quantization


def drift_steps(small_inputs, sampler: str) -> tuple[list[dict], list, list]:
    """Rows of three steps, a check after each; log-probs of each step's rollouts, and those by the first weights."""
    overrides = ["drift.steps=3", "drift.check_every=1", "drift.check_prompts=2", "data.max_prompt_length=64"]
    stage = DriftStage.of(load_settings([DEFAULT, DEFAULT.with_name("test.yaml")], overrides))
    train = stage.train.model_copy(update={"score_centering": centering_settings("none", 512)})
    model, tokenizer = load_folder(small_inputs.model_folder)
    trainer = LocalTrainer(train, "none", 0, small_inputs, model)
    with Scorer() as scorer:
        run = DriftRun(stage.drift, sampler, Task(train, 0, small_inputs, tokenizer, 512), trainer, scorer)
        sampled, generate = [], run.generate

        def noting(prompts, n, *arguments):
            rollouts = generate(prompts, n, *arguments)
            if n == stage.drift.n:
                sampled.append([rollout.logprobs.tolist() for rollout in rollouts])
            return rollouts

        run.generate = noting
        rows = list(run.rows())
    model, _ = load_folder(small_inputs.model_folder)
    start = LocalTrainer(train, "none", 0, small_inputs, model)
    start.sync(0)
    expected = []
    for step in (1, 2, 3):
        ids = [prompt.ids for prompt in run.task.prompts(step)]
        rollouts = start.engine.generate(ids, stage.drift.n, run.task.sampling(), run.task.seed(step), 0)
        expected.append([rollout.logprobs.tolist() for rollout in rollouts])
    return rows, sampled, expected


def test_a_frozen_sampler_is_frozen_again_after_a_check(small_inputs):
    rows, sampled, expected = drift_steps(small_inputs, "frozen")
    assert sampled == expected
    assert rows[3]["displacement"] > rows[1]["displacement"] > 0


def test_an_online_sampler_is_that_of_the_step(small_inputs):
    _, sampled, expected = drift_steps(small_inputs, "online")
    assert sampled[0] == expected[0] and sampled[1] != expected[1] and sampled[2] != expected[2]
