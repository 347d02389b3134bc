"""Rollouts of the trainer's own forward: no mismatch at all, and the tokens that drawing one after another gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from score_centering.model.sources import load_folder
from score_centering.rollout import Rollout, Sampling
from score_centering.rollout.local.sampling import draw
from score_centering.rollout.streams import streams, uniforms
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training.exact_sampler import ExactSampler
from score_centering.training.local import LocalTrainer
from score_centering.training.task import Inputs, Task

CONFIG = ["config/config.yaml", "config/test.yaml", "config/exact.yaml"]
SHAPE = ["data.max_prompt_length=64", "data.max_response_length=12", "data.val_batch_size=4"]


def trainer_and_task(inputs: Inputs, arm: str, *overrides: str) -> tuple[LocalTrainer, Task]:
    stage = TrainStage.of(load_settings(CONFIG, [*SHAPE, *overrides], arm))
    model, tokenizer = load_folder(inputs.model_folder)
    trainer = LocalTrainer(stage, arm, 0, inputs, model)
    trainer.sync(0)
    return trainer, Task(stage, 0, inputs, tokenizer, 512)


def mismatch(trainer: LocalTrainer, task: Task, step: int) -> dict[str, float]:
    rollouts = trainer.engine.generate([p.ids for p in task.prompts(step)], 4, task.sampling(), task.seed(step), 0)
    gains = torch.linspace(-1, 1, len(rollouts))
    row = trainer.update(rollouts, gains, step)
    trainer.sync(step)
    return row


@pytest.mark.parametrize("micro", [3, 8])
def test_the_update_meets_its_own_numbers(small_inputs, micro):
    """K3 and the largest gap of an exact sampler are 0, not small; the engine's are small and not 0."""
    overrides = [
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.actor.optim.lr=0.01",
    ]
    exact, task = trainer_and_task(small_inputs, "grpo_exact", *overrides)
    engine, _ = trainer_and_task(small_inputs, "grpo_bf16", *overrides)
    for step in (1, 2):
        row, other = mismatch(exact, task, step), mismatch(engine, task, step)
        assert (row["k3_kl"], row["abs_logprob_gap_max"], row["importance_ratio_max"]) == (0.0, 0.0, 1.0)
        assert 0 < other["abs_logprob_gap_max"] < 0.5


def test_its_tokens_are_those_of_drawing_one_after_another(small_inputs):
    """Each token drawn from a forward over its prefix alone, by the stream of its rollout."""
    trainer, task = trainer_and_task(small_inputs, "grpo_exact")
    prompts = [prompt.ids for prompt in task.prompts(1)]
    rollouts = trainer.engine.generate(prompts, 4, task.sampling(), 11, 0)
    owner = np.arange(len(rollouts)) // 4
    numbers = uniforms(streams(11, owner, np.arange(len(rollouts)) % 4), 12)
    equal = 0
    for rollout, row in zip(rollouts, numbers, strict=True):
        tokens, drawn = list(prompts[rollout.prompt_index]), []
        with torch.no_grad():
            while len(drawn) < 12 and not (drawn and drawn[-1] in task.stop_token_ids):
                logits = trainer.model(input_ids=torch.tensor([tokens + drawn]), use_cache=False).logits[0, -1:]
                number = torch.from_numpy(row[len(drawn) : len(drawn) + 1])
                drawn.append(int(draw(logits.float().log_softmax(-1), number)))
        equal += drawn == rollout.token_ids.tolist()
        assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] in task.stop_token_ids else "length")
    assert equal >= len(rollouts) - 1, "another shape's rounding may turn one token"


class WrongGuesses:
    """An engine whose every rollout is one token, the same, that ends nothing."""

    def generate_streams(self, prompts, owner, stream, sampling, top_logprobs):
        empty = np.zeros(1, np.float32)
        return [
            Rollout(
                int(i), j % 4, np.asarray(prompts[i], np.int32), np.array([5], np.int32), empty, None, None, "length"
            )
            for j, i in enumerate(owner)
        ]


def test_what_was_guessed_is_forgotten(small_inputs):
    """From worthless guesses the same rollouts come out, candidates too."""
    trainer, task = trainer_and_task(small_inputs, "grpo_exact", "score_centering.enabled=true")
    prompts = [prompt.ids for prompt in task.prompts(1)]
    wanted = trainer.engine.generate(prompts, 4, task.sampling(), 3, 16)
    found = ExactSampler(WrongGuesses(), trainer.updater).generate(prompts, 4, task.sampling(), 3, 16)
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(one.logprobs, other.logprobs) and one.finish_reason == other.finish_reason
        assert one.candidate_ids.tolist() == other.candidate_ids.tolist()
        assert np.array_equal(one.candidate_logprobs, other.candidate_logprobs)


def test_a_forward_that_does_not_repeat_is_refused(small_inputs, monkeypatch):
    trainer, task = trainer_and_task(small_inputs, "grpo_exact")
    flips, seen = iter(range(10**6)), ExactSampler._look

    def restless(self, rollouts, uniform, top_logprobs):
        shift = next(flips) % 2 if len(rollouts) == 8 else 0
        return [
            replace(found, drawn=(found.drawn + shift) % 512) for found in seen(self, rollouts, uniform, top_logprobs)
        ]

    monkeypatch.setattr(ExactSampler, "_look", restless)
    with pytest.raises(
        UserError, match=r"^actor_rollout_ref\.rollout\.exact: 8 forwards of the trainer .* do not agree"
    ):
        trainer.engine.generate([prompt.ids for prompt in task.prompts(1)], 4, task.sampling(), 3, 0)


def test_greedy_rollouts_are_the_engines(small_inputs):
    trainer, task = trainer_and_task(small_inputs, "grpo_exact")
    prompts, greedy = [prompt.ids for prompt in task.validation], Sampling(1.0, 12, True, task.stop_token_ids)
    wanted = trainer.clean_engine(0).generate(prompts, 1, greedy, 0, 0)
    found = trainer.engine.generate(prompts, 1, greedy, 0, 0)
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in wanted]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.name=verl", "trainer.name = 'local', it is 'verl'"),
        ("trainer.sync_every=2", "trainer.sync_every = 1, it is 2"),
        ("perturbation.weight_noise=0.1", "perturbation = None, it is set"),
        ("actor_rollout_ref.rollout.quantization=int8", "actor_rollout_ref.rollout.quantization = None, it is 'int8'"),
        (
            "actor_rollout_ref.rollout.transport=gateway",
            "actor_rollout_ref.rollout.transport = 'direct', it is 'gateway'",
        ),
    ],
)
def test_what_can_not_be_exact_is_refused(override, told):
    with pytest.raises(UserError) as refused:
        load_settings(CONFIG, [override], "grpo_exact")
    assert told in str(refused.value)
