"""The local engine on a CPU: rows independent to the bit, memory as the formats say, weights arriving in place."""

import contextlib
import copy
import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from score_centering.precision import requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.registry import FORMATS, cache_format_of, format_of
from score_centering.rollout import LocalEngine, Rollout, Sampling, validate_all
from score_centering.routing.replay import replaying
from score_centering.settings import UserError
from score_centering.validation.layers import quantised_cache, quantised_layers, stored_parts

QWEN = Qwen3_5TextConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    initializer_range=0.15,
)
MOE = Qwen3_5MoeTextConfig(
    **{key: value for key, value in QWEN.to_diff_dict().items() if key not in ("intermediate_size", "model_type")}
    | {"initializer_range": 0.1},
    moe_intermediate_size=48,
    shared_expert_intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
)
LLAMA = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.15,
    tie_word_embeddings=False,
)
QWEN3 = Qwen3Config(
    **{key: LLAMA.to_dict()[key] for key in LLAMA.to_diff_dict() if key != "model_type"} | {"head_dim": 32}
)
QWEN2 = Qwen2Config(
    **{key: LLAMA.to_dict()[key] for key in LLAMA.to_diff_dict() if key not in ("model_type", "head_dim")}
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}
SAMPLING = Sampling(temperature=1.0, max_tokens=12, greedy=False, stop_token_ids=tuple(range(20)))
GREEDY = Sampling(temperature=1.0, max_tokens=12, greedy=True, stop_token_ids=(3,))
PROMPTS = [np.random.default_rng(0).integers(0, 300, length).tolist() for length in (1, 2, 23, 24, 9, 17, 5, 3, 20, 11)]
LOW = {"quantised_config": W8A8, "kv_cache": "int4_per_token_head"}
BF16 = {"quantised_config": None, "kv_cache": "auto"}


@functools.cache
def reference(model_type: str) -> torch.nn.Module:
    config = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_5_text": QWEN, "qwen3_5_moe_text": MOE}[model_type]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if config is QWEN3:  # each head's norms differ from 1 and from each other
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    if config is QWEN2:  # transformers starts biases at 0
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.5)
    return model


def weights_of(config: PreTrainedConfig, listed: Sequence[str]) -> dict[str, torch.Tensor]:
    parameters = reference(config.model_type).named_parameters()
    return requantise({name: parameter.detach() for name, parameter in parameters}, listed)


def make(config: PreTrainedConfig, mode: dict, max_batch: int = 20) -> LocalEngine:
    """A mixture of experts also records its routes."""
    sizes = {"max_batch": max_batch, "max_prompt_length": 24, "max_response_length": 12}
    engine = LocalEngine(config, **mode, **sizes, record_routes=config is MOE)
    engine.sync(weights_of(config, engine.listed), step=0)
    return engine


def assert_same(first: Sequence[Rollout], second: Sequence[Rollout]) -> None:
    """Equal to the last bit."""
    for a, b in zip(first, second, strict=True):
        assert (a.prompt_index, a.sample_index, a.finish_reason) == (b.prompt_index, b.sample_index, b.finish_reason)
        for field in ("prompt_ids", "token_ids", "logprobs", "candidate_ids", "candidate_logprobs", "routes"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


@pytest.mark.parametrize(
    ("config", "mode"),
    [(QWEN, LOW), (QWEN, BF16), (LLAMA, LOW), (LLAMA, BF16), (QWEN3, LOW), (QWEN2, LOW), (MOE, LOW)],
    ids=["qwen3.5-low", "qwen3.5-bf16", "llama-low", "llama-bf16", "qwen3-low", "qwen2-low", "mixture-low"],
)
def test_a_rollout_does_not_depend_on_what_shares_its_batch(config, mode):
    engine = make(config, mode)
    whole = engine.generate(PROMPTS, 3, SAMPLING, seed=7, top_logprobs=5)
    validate_all(whole, config.vocab_size)
    assert len({len(r.token_ids) for r in whole}) > 3  # slots were refilled and compacted at different times
    assert_same(whole, engine.generate(PROMPTS, 3, SAMPLING, seed=7, top_logprobs=5))
    assert_same(whole[:3], engine.generate(PROMPTS[:1], 3, SAMPLING, seed=7, top_logprobs=5))
    fewer = engine.generate(PROMPTS, 1, SAMPLING, seed=7, top_logprobs=5)
    assert_same([r for r in whole if r.sample_index == 0], fewer)
    others = [prompt if i % 3 == 2 else PROMPTS[(i + 4) % 10] for i, prompt in enumerate(PROMPTS)]
    mixed = engine.generate(others, 3, SAMPLING, seed=7, top_logprobs=5)
    assert_same([r for r in whole if r.prompt_index % 3 == 2], [r for r in mixed if r.prompt_index % 3 == 2])
    assert_same(whole, make(config, mode, max_batch=64).generate(PROMPTS, 3, SAMPLING, seed=7, top_logprobs=5))


def test_a_seed_gives_every_rollout_its_own_stream():
    engine = make(QWEN, BF16)
    first = engine.generate([PROMPTS[4]] * 2, 2, SAMPLING, seed=1, top_logprobs=0)
    other = engine.generate([PROMPTS[4]] * 2, 2, SAMPLING, seed=2, top_logprobs=0)
    assert len({tuple(r.token_ids.tolist()) for r in first + other}) == 8


@pytest.mark.parametrize(
    "config", [QWEN, MOE, LLAMA, QWEN2, QWEN3], ids=["qwen3.5", "qwen3.5-moe", "llama", "qwen2", "qwen3"]
)
def test_log_probs_are_those_of_transformers(config):
    """The engine errs as transformers' own BF16 forward does against FP32; a wrong position or mask errs by nats."""
    rollouts = make(config, BF16).generate(PROMPTS, 1, SAMPLING, seed=3, top_logprobs=300)
    model = reference(config.model_type)
    exact = copy.deepcopy(model).float()
    gaps = []  # (engine, transformers BF16) mean absolute error of every rollout, over the whole vocabulary
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids[:-1]]).astype(np.int64))[None]
        routes = None if rollout.routes is None else torch.from_numpy(rollout.routes)[None]
        logits = []
        for net in (exact, model):
            with torch.no_grad(), replaying(net, routes):  # else a mixture errs by taking other experts
                logits.append(net(ids).logits[0, len(rollout.prompt_ids) - 1 :].float())
        expected, rounded = (torch.log_softmax(rows, dim=-1).numpy() for rows in logits)
        ours = np.empty_like(expected)
        np.put_along_axis(ours, rollout.candidate_ids.astype(np.int64), rollout.candidate_logprobs, axis=1)
        gaps.append((np.abs(ours - expected).mean(), np.abs(rounded - expected).mean()))
        sampled = np.take_along_axis(ours, rollout.token_ids[:, None].astype(np.int64), axis=1)[:, 0]
        np.testing.assert_allclose(rollout.logprobs, sampled, atol=5e-4)
    engine, transformers = np.mean(gaps, axis=0)
    assert engine < 1.3 * transformers < 0.1


def test_low_precision_errs_but_not_wildly():
    low, exact = (make(QWEN, mode).generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=300) for mode in (LOW, BF16))
    gaps = []
    for a, b in zip(low, exact, strict=True):  # the first token: same context in both
        order_a, order_b = a.candidate_ids[0].argsort(), b.candidate_ids[0].argsort()
        gaps.append(np.abs(a.candidate_logprobs[0][order_a] - b.candidate_logprobs[0][order_b]).mean())
    assert 0.005 < np.mean(gaps) < 0.3


def test_greedy_takes_the_most_probable_token():
    engine = make(QWEN, LOW)
    rollouts = engine.generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=1)
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.token_ids, rollout.candidate_ids[:, 0])
    assert_same(rollouts, engine.generate(PROMPTS, 1, GREEDY, seed=99, top_logprobs=1))


def test_temperature_divides_the_logits():
    engine = make(QWEN, BF16)
    sharp = Sampling(temperature=0.5, max_tokens=1, greedy=False, stop_token_ids=())
    flat = Sampling(temperature=1.0, max_tokens=1, greedy=False, stop_token_ids=())
    a, b = (engine.generate(PROMPTS[:1], 1, s, seed=0, top_logprobs=300)[0] for s in (sharp, flat))
    logits = 2 * np.sort(b.candidate_logprobs[0].astype(np.float64))
    expected = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(np.sort(a.candidate_logprobs[0]), expected, atol=3e-3)


def test_finish_reasons():
    for rollout in make(QWEN, LOW).generate(PROMPTS, 3, SAMPLING, seed=5, top_logprobs=0):
        stopped = rollout.token_ids[-1] in SAMPLING.stop_token_ids
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert not np.isin(rollout.token_ids[:-1], SAMPLING.stop_token_ids).any()
        assert stopped or len(rollout.token_ids) == SAMPLING.max_tokens
        assert rollout.candidate_ids is None and rollout.candidate_logprobs is None


def test_memory_is_int8_and_int4():
    """INT8 codes: 1 byte a listed parameter. KV cache at head size 256: 264 bytes a token and head; BF16: 1024."""
    config = LlamaConfig(**{**LLAMA.to_dict(), "head_dim": 256, "hidden_size": 64})
    low, exact = (
        LocalEngine(config, **mode, max_batch=4, max_prompt_length=24, max_response_length=12) for mode in (LOW, BF16)
    )
    layers, kv_heads, tokens = 2, 2, 4 * (24 + 12)
    assert low.nbytes()["kv_cache"] == 264 * layers * kv_heads * tokens
    assert exact.nbytes()["kv_cache"] == 1024 * layers * kv_heads * tokens
    attention, mlp = (4 + 2 + 2 + 4) * 256 * 64, 3 * 96 * 64
    assert len(low.listed) == 7 * layers and low.nbytes()["linear_values"] == (attention + mlp) * layers
    assert exact.nbytes()["linear_values"] == 0


def test_the_gates_norms_embeddings_and_head_stay_bf16():
    listed = make(QWEN, LOW).listed
    assert not [name for name in listed if "in_proj_a" in name or "in_proj_b" in name or "lm_head" in name]
    assert len(listed) == 3 * 3 + 4 + 4 * 3


def test_sync_copies_in_place_and_changes_the_rollouts():
    engine = make(QWEN, LOW)
    codes = engine._weights.layers[3].mixer.qkv.matrices[0].values
    address = codes.data_ptr()
    before = engine.generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=3)
    weights = weights_of(QWEN, engine.listed)
    engine.sync({**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, step=1)
    assert codes.data_ptr() == address and engine.step == 1
    assert any(
        (a.candidate_logprobs[0] != b.candidate_logprobs[0]).any()
        for a, b in zip(before, engine.generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=3), strict=True)
    )
    engine.sync(weights, step=2)
    assert_same(before, engine.generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=3))


def test_sync_refuses_wrong_weights():
    engine = make(QWEN, LOW)
    weights = weights_of(QWEN, engine.listed)
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(UserError, match=f"{name}_scale' is missing"):
        engine.sync({k: v for k, v in weights.items() if k != f"{name}_scale"}, step=1)
    with pytest.raises(UserError, match=r"down_proj\.weight is torch\.bfloat16"):
        engine.sync({**weights, name: weights[name].bfloat16()}, step=1)
    with pytest.raises(UserError, match="'extra', which this engine does not have"):
        engine.sync({**weights, "extra": weights[name]}, step=1)


def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace():
    engine = make(QWEN, LOW)
    request = (PROMPTS[:4], 1, SAMPLING, 0, 2)
    before = engine.generate(*request)
    weights = weights_of(QWEN, engine.listed)
    engine.sync({**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")}, step=5)
    with pytest.raises(
        ValueError, match=r"prompt 0, sample 0\) has a log-prob that is not finite \(weights of step 5\)"
    ):
        engine.generate(*request)
    engine.sync(weights, step=6)
    assert_same(before, engine.generate(*request))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1] * 25]}, "prompt 0 has 25 tokens, allowed are 1 … 24"),
        ({"prompts": [[1], []]}, "prompt 1 has 0 tokens"),
        ({"prompts": [[300]]}, "prompt 0 holds a token id outside 0 … 299"),
        ({"n": 0}, "n is 0"),
        ({"top_logprobs": 301}, "top_logprobs is 301, allowed are 0 … 300"),
        ({"sampling": Sampling(1.0, 13, False, ())}, "max_tokens is 13, allowed are 1 … 12"),
        ({"sampling": Sampling(1.0, 3, False, (300,))}, "stop token 300"),
    ],
)
def test_requests_that_are_refused(change, message):
    request = {"prompts": [[1]], "n": 1, "sampling": SAMPLING, "seed": 0, "top_logprobs": 0}
    with pytest.raises(UserError, match=message):
        make(LLAMA, BF16).generate(**{**request, **change})


def test_engines_that_are_refused():
    size = {"max_batch": 4, "max_prompt_length": 24, "max_response_length": 12}
    mixed = Qwen3Config(**{**QWEN3.to_dict(), "layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(UserError, match="layer type 'sliding_attention', allowed are full_attention"):
        LocalEngine(mixed, **BF16, **size)
    with pytest.raises(UserError, match="attention_bias is True"):
        LocalEngine(LlamaConfig(**{**LLAMA.to_dict(), "attention_bias": True}), **BF16, **size)
    with pytest.raises(UserError, match="mlp_bias is True"):
        LocalEngine(LlamaConfig(**{**LLAMA.to_dict(), "mlp_bias": True}), **BF16, **size)
    with pytest.raises(ValueError, match="powers of two"):
        LocalEngine(LlamaConfig(**{**LLAMA.to_dict(), "head_dim": 48}), **LOW, **size)
    with pytest.raises(UserError, match="no weights yet"):
        LocalEngine(LLAMA, **BF16, **size).generate([[1]], 1, SAMPLING, 0, 0)


WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # groups of every format divide its layers


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_of_every_format_computes_with_its_numbers(name):
    """Rows keep their bits, and the log-probs are those of transformers' model that computes with the same format."""
    scheme = {"quantization_config": format_of(name).quantization_config(["Linear"], ["lm_head"])}
    config = LlamaConfig(**{**LLAMA.to_dict(), **WIDE})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    sizes = {"max_batch": 20, "max_prompt_length": 24, "max_response_length": 12}
    engine = LocalEngine(config, quantised_config=scheme, kv_cache="auto", **sizes)
    weights = requantise({key: value.detach() for key, value in model.named_parameters()}, engine.listed)
    engine.sync(weights, step=0)
    whole = engine.generate(PROMPTS, 2, SAMPLING, seed=5, top_logprobs=300)
    assert_same(whole[:2], engine.generate(PROMPTS[:1], 2, SAMPLING, seed=5, top_logprobs=300))
    gaps = {"emulated": [], "bf16": []}
    stored = stored_parts(weights, engine.listed)
    for rollout in whole:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids[:-1]]).astype(np.int64))[None]
        ours = torch.empty(len(rollout.token_ids), 300)
        ours.scatter_(
            1, torch.from_numpy(rollout.candidate_ids.astype(np.int64)), torch.from_numpy(rollout.candidate_logprobs)
        )
        for kind, how in (
            ("emulated", quantised_layers(model, stored, engine.listed)),
            ("bf16", contextlib.nullcontext()),
        ):
            with torch.no_grad(), how:
                logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 :].float()
            gaps[kind].append((ours - torch.log_softmax(logits, dim=-1)).abs().mean().item())
    assert np.mean(gaps["emulated"]) < 0.5 * np.mean(gaps["bf16"])


def test_a_quantised_engine_holds_the_bytes_that_its_format_says():
    for name in FORMATS:
        used = format_of(name)
        scheme = {"quantization_config": used.quantization_config(["Linear"], ["lm_head"])}
        config = LlamaConfig(**{**LLAMA.to_dict(), **WIDE})
        engine = LocalEngine(
            config, quantised_config=scheme, kv_cache="auto", max_batch=1, max_prompt_length=8, max_response_length=8
        )
        shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (128, 128), (128, 128), (128, 128)] * 2
        held = engine.nbytes()
        assert held["linear_values"] + held["linear_scales"] == sum(
            used.held_bytes(*shape, torch.device("cpu")) for shape in shapes
        )


@pytest.mark.parametrize("kv_cache", ["int8_per_token_head", "fp8"])
def test_an_engine_of_every_cache_reads_what_it_stores(kv_cache):
    """Rows keep their bits; the log-probs are closer to the emulation of the cache than to BF16's."""
    engine = make(LLAMA, {**BF16, "kv_cache": kv_cache})
    whole = engine.generate(PROMPTS, 2, SAMPLING, seed=5, top_logprobs=300)
    assert_same(whole[:2], engine.generate(PROMPTS[:1], 2, SAMPLING, seed=5, top_logprobs=300))
    model = reference("llama")
    gaps = {"emulated": [], "bf16": []}
    for rollout in whole:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.token_ids[:-1]]).astype(np.int64))[None]
        ours = torch.empty(len(rollout.token_ids), 300)
        candidates = torch.from_numpy(rollout.candidate_ids.astype(np.int64))
        ours.scatter_(1, candidates, torch.from_numpy(rollout.candidate_logprobs))
        emulation = quantised_cache(model, cache_format_of(kv_cache))
        for kind, how in (("emulated", emulation), ("bf16", contextlib.nullcontext())):
            with torch.no_grad(), how:
                logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 :].float()
            gaps[kind].append((ours - torch.log_softmax(logits, dim=-1)).abs().mean().item())
    assert np.mean(gaps["emulated"]) < np.mean(gaps["bf16"]), gaps


@pytest.mark.parametrize(
    ("kv_cache", "size"),  # bytes of K and V of one token and head at head size 32, by hand
    [("auto", 128), ("int4_per_token_head", 2 * (16 + 4)), ("int8_per_token_head", 2 * (32 + 4)), ("fp8", 64)],
)
def test_a_cache_holds_the_bytes_of_its_format(kv_cache, size):
    engine = LocalEngine(
        LlamaConfig(**{**LLAMA.to_dict(), "head_dim": 32}), quantised_config=None, kv_cache=kv_cache, max_batch=3,
        max_prompt_length=64, max_response_length=16,
    )  # fmt: skip
    assert engine.nbytes()["kv_cache"] == size * 2 * 2 * 3 * 80  # layers, KV heads, slots, positions
