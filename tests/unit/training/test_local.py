"""The local trainer as the run loop sees it: what its two engines hold after an update."""

from pathlib import Path

import numpy as np
import pytest
import torch

from score_centering.model.sources import load_folder
from score_centering.settings import load_settings
from score_centering.settings.stages import TrainStage
from score_centering.settings.study_blocks import Perturbation
from score_centering.training.local import LocalTrainer
from score_centering.training.task import Inputs, Task

ROOT = Path(__file__).parents[3]
CONFIG = [ROOT / "config/config.yaml", ROOT / "config/test.yaml"]


@pytest.fixture
def made(small_inputs: Inputs):
    """A noisy INT8 trainer that has taken one update, and its task."""
    overrides = ["data.max_prompt_length=64", "data.val_batch_size=4", "actor_rollout_ref.actor.optim.lr=0.01"]
    stage = TrainStage.of(load_settings(CONFIG, overrides, "sc"), Perturbation(weight_noise=0.5))
    model, tokenizer = load_folder(small_inputs.model_folder)
    trainer, task = LocalTrainer(stage, "sc", 0, small_inputs, model), Task(stage, 0, small_inputs, tokenizer, 512)
    trainer.sync(0)
    trainer.clean_engine(0)  # has to follow the update
    ids = [prompt.ids for prompt in task.prompts(1)]
    rollouts = trainer.engine.generate(ids, 4, task.sampling(), task.seed(1), task.top_logprobs)
    trainer.update(rollouts, torch.tensor([1.0, -1.0] * 4), 1)
    return trainer, task


def test_the_clean_engine_samples_the_trained_weights_without_noise_or_quantisation(made):
    """Its log-probs are those of the trainer's own forward up to BF16's roundings; the noisy engine's are far away."""
    trainer, task = made
    trainer.sync(1)
    ids, sampling = [prompt.ids for prompt in task.validation], task.sampling(temperature=1.0)

    def gap(engine) -> float:
        gaps = []
        for rollout in engine.generate(ids, 1, sampling, 7, 0):
            tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids])).long()[None]
            with torch.no_grad():
                logits = trainer.model(input_ids=tokens, use_cache=False).logits[0].double()
            rows = logits.log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
            own = rows.gather(1, torch.from_numpy(rollout.token_ids).long()[:, None])[:, 0]
            gaps.append((own - torch.from_numpy(rollout.logprobs).double()).abs())
        return torch.cat(gaps).mean().item()

    clean, noisy = gap(trainer.clean_engine(1)), gap(trainer.engine)
    assert clean < 0.02 < 0.1 < noisy


def test_the_clean_reward_leaves_training_alone(made):
    """Neither the sampler's weights nor any random generator knows of it."""
    trainer, task = made
    before, states = trainer.engine.step, torch.get_rng_state()
    trainer.clean_engine(1).generate([task.validation[0].ids], 1, task.sampling(temperature=1.0), 3, 0)
    assert trainer.engine.step == before == 0
    assert torch.equal(torch.get_rng_state(), states)


def test_a_stale_sampler_goes_on_with_the_weights_it_was_given(made):
    """After two updates and a look at the fresh weights, the held ones sample what they sampled before."""
    trainer, task = made
    ids, gains = [prompt.ids for prompt in task.prompts(2)], torch.tensor([1.0, -1.0] * 4)

    def sampled() -> list[list[float]]:
        made = trainer.engine.generate(ids, 4, task.sampling(), task.seed(2), task.top_logprobs)
        return [rollout.logprobs.tolist() for rollout in made]

    trainer.sync(1)
    trainer.hold(1)
    first = sampled()
    rollouts = trainer.engine.generate(ids, 4, task.sampling(), task.seed(2), task.top_logprobs)
    trainer.update(rollouts, gains, 2)
    assert sampled() == first, "an update reached the engine by itself"
    trainer.sync(2)
    assert sampled() != first
    trainer.sync_held()
    assert sampled() == first and trainer.engine.step == 1
