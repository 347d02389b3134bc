"""Recorded routes in use: the engine's expert choices of a mixture of experts are the trainer's, which else differ."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from score_centering.objectives import build_objective
from score_centering.precision import requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Rollout, Sampling, validate_all
from score_centering.rollout.make_engine import make_engine as make_rollout_engine
from score_centering.rollout.wire import decode, encode
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.local import engine_options
from score_centering.training.masters import MasterWeights
from score_centering.training.micro_batch import make_micro_batch
from score_centering.training.update import Updater

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
CONFIG = Qwen3_5MoeTextConfig(
    **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=16, num_experts_per_tok=4
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}
PROMPTS = [np.random.default_rng(1).integers(0, 120, length).tolist() for length in (1, 9, 24, 5)]
SAMPLING = Sampling(temperature=1.0, max_tokens=12, greedy=False, stop_token_ids=tuple(range(8)))


def fresh_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


def make_engine(config, **changes) -> LocalEngine:
    arguments = {
        "quantised_config": W8A8,
        "kv_cache": "int4_per_token_head",
        "record_routes": True,
    }
    sizes = {"max_batch": 8, "max_prompt_length": 24, "max_response_length": 12}
    return LocalEngine(config, **{**arguments, **sizes, **changes})


@functools.cache
def rollouts() -> list[Rollout]:
    """Low-precision rollouts with the routes of every token but the last."""
    engine = make_engine(CONFIG)
    weights = {name: value.detach() for name, value in fresh_model().state_dict().items()}
    engine.sync(requantise(weights, engine.listed), 0)
    made = engine.generate(PROMPTS, 3, SAMPLING, seed=5, top_logprobs=4)
    validate_all(made, CONFIG.vocab_size)
    return made


def updater(net: torch.nn.Module) -> Updater:
    objective = build_objective(
        "sc",
        policy_loss="score_centering",
        centering=True,
        is_mode="none",
        loss_agg_mode="token-mean",
        tis_max=2.0,
        mis_min=0.5,
        mis_max=5.0,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
    )
    actor = Actor(optim=Optim(name="sgd", lr=1e-6), ppo_micro_batch_size_per_gpu=12)
    return Updater(net, MasterWeights(net, actor.optim), objective, actor, 1.0, "stop")


def trainer_routes(net: torch.nn.Module, batch: list[Rollout]) -> tuple[np.ndarray, dict]:
    """What the experts of the trainer's forward were given, (B, S, layers, top-k), and the update's metrics."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
        for layer in net.model.layers
    ]
    metrics = updater(net).update(batch, torch.ones(len(batch)), step=1)
    for hook in hooks:
        hook.remove()
    routes = torch.stack([ids.view(len(batch), -1, 4) for ids in seen], dim=2).numpy()
    longest_first = np.argsort([-len(rollout.prompt_ids) - len(rollout.token_ids) for rollout in batch], kind="stable")
    return routes[np.argsort(longest_first)], metrics


def differing_share(routes: np.ndarray, batch: list[Rollout]) -> float:
    """Share of (token, layer) whose set of experts is not the sampler's."""
    different = [
        (np.sort(routes[row, : len(rollout.routes)]) != np.sort(rollout.routes)).any(-1)
        for row, rollout in enumerate(batch)
    ]
    return float(np.concatenate(different).mean())


def without_routes(batch: list[Rollout]) -> list[Rollout]:
    return [dataclasses.replace(rollout, routes=None) for rollout in batch]


def test_the_engine_records_every_token_but_the_last():
    for rollout in rollouts():
        tokens = len(rollout.prompt_ids) + len(rollout.token_ids)
        assert rollout.routes.shape == (tokens - 1, 2, 4) and rollout.routes.dtype == np.uint8
        ordered = np.sort(rollout.routes, axis=-1)
        assert (ordered[..., 1:] != ordered[..., :-1]).all() and ordered.max() < 16
    assert len({rollout.finish_reason for rollout in rollouts()}) == 2
    for first, second in zip(rollouts()[::3], rollouts()[1::3], strict=True):  # a prompt is read once for all samples
        shared = len(first.prompt_ids)
        np.testing.assert_array_equal(first.routes[:shared], second.routes[:shared])


def test_without_replay_some_choices_differ_with_it_none():
    batch = rollouts()
    apart, own = trainer_routes(fresh_model(), without_routes(batch))
    together, replayed = trainer_routes(fresh_model(), batch)
    assert 0.02 < differing_share(apart, batch) < 0.9
    for row, rollout in enumerate(batch):
        np.testing.assert_array_equal(together[row, : len(rollout.routes)], rollout.routes)
        assert not together[row, len(rollout.routes) :].any()  # the last token and padding predict nothing
    assert replayed["k3_kl"] < own["k3_kl"]


def test_routes_travel_with_the_record():
    for rollout in rollouts():
        np.testing.assert_array_equal(decode(encode(rollout), CONFIG.vocab_size, 4).routes, rollout.routes)


def test_recording_changes_no_rollout():
    engine = make_engine(CONFIG, record_routes=False)
    weights = {name: value.detach() for name, value in fresh_model().state_dict().items()}
    engine.sync(requantise(weights, engine.listed), 0)
    for a, b in zip(engine.generate(PROMPTS, 3, SAMPLING, seed=5, top_logprobs=4), rollouts(), strict=True):
        assert a.routes is None
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


SWITCH = "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"


def test_the_switch_reaches_the_engine():
    overrides = ["actor_rollout_ref.rollout.quantization=null", "actor_rollout_ref.rollout.max_num_seqs=4"]
    for extra, recorded in (([], False), ([SWITCH], True)):
        stage = TrainStage.of(load_settings(overrides=[*overrides, *extra]))
        assert (make_rollout_engine(engine_options(stage, 0), CONFIG)._prompt_routes.numel() > 0) == recorded


@pytest.mark.parametrize("other", ["actor_rollout_ref.rollout.transport=gateway", "trainer.name=verl"])
def test_routes_are_never_lost_silently(other):
    with pytest.raises(UserError, match=r"enable_rollout_routing_replay = true needs trainer\.name local"):
        load_settings(overrides=[SWITCH, other])


def test_a_dense_model_holds_and_records_nothing():
    dense = Qwen3_5TextConfig(**SIZES, intermediate_size=32)
    with pytest.raises(UserError, match="enable_rollout_routing_replay needs a mixture of experts, model_type 'qwen3"):
        make_engine(dense)
    engine = make_engine(dense, record_routes=False)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(dense, dtype=torch.bfloat16)
    engine.sync(requantise({k: v.detach() for k, v in net.state_dict().items()}, engine.listed), 0)
    [rollout] = engine.generate(PROMPTS[:1], 1, SAMPLING, seed=0, top_logprobs=0)
    assert rollout.routes is None and engine._records[0].routes.nbytes == 0
    assert make_micro_batch([rollout], torch.ones(1), torch.ones(len(rollout.token_ids)), "cpu").routes is None


def test_a_row_without_routes_is_named():
    batch = [rollouts()[0], dataclasses.replace(rollouts()[1], routes=None)]
    tokens = sum(len(rollout.token_ids) for rollout in batch)
    with pytest.raises(ValueError, match=r"rollout \(prompt 0, sample 1\): it has no routes"):
        make_micro_batch(batch, torch.ones(2), torch.ones(tokens), "cpu")


def test_the_cpu_kernels_know_the_mixture():
    exact, ours = fresh_model(), fresh_model()
    install_cpu_kernels(ours)
    ids = torch.tensor([PROMPTS[2]])
    a, b = (net(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for net in (exact, ours))
    assert (a - b).abs().mean() < 0.02
    assert not [module for module in ours.modules() if type(module).__name__ == "Qwen3_5MoeGatedDeltaNet"]
