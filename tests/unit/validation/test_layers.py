"""Errors by layer, on numbers worked out by hand and on a tiny model."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from score_centering.precision import int4_kv, int8_linear, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.kv_caches import INT4 as INT4_KV
from score_centering.validation.layers import (
    Error,
    quantised_cache,
    quantised_layers,
    recorded_outputs,
    stored_parts,
    weight_errors,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def listed(model):
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    return dict.fromkeys(linears, INT8)


@pytest.fixture(scope="module")
def w8a8(model, listed):
    return requantise(dict(model.state_dict()), listed)


IDS = torch.arange(24).reshape(2, 12) % 64
MASK = torch.ones(2, 12, dtype=torch.bool)


def test_relative_error_by_hand():
    error = Error()
    error.add(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]))
    error.add(torch.tensor([1.0]), torch.tensor([0.0]))
    assert error.numbers("weight") == {"weight_relative": pytest.approx((17 / 25) ** 0.5), "weight_max": 4.0}
    assert Error().relative == 0.0


def test_weight_errors_by_hand():
    base = {"l.weight": torch.tensor([[1.0, -0.5], [0.0, 2.0]], dtype=torch.bfloat16)}
    w8a8 = {
        "l.weight": torch.tensor([[4, -2], [0, 4]], dtype=torch.int8),
        "l.weight_scale": torch.tensor([[0.25], [0.25]], dtype=torch.bfloat16),
    }
    numbers = weight_errors(base, w8a8, {"l": INT8})["l"]
    assert numbers == {
        "weight_relative": pytest.approx(1 / 5.25**0.5),
        "weight_max": 1.0,
        "weight_channel_max": pytest.approx(0.5),
    }


def test_one_doubled_scale_shows_in_its_channel(model, w8a8, listed):
    clean = weight_errors(model.state_dict(), w8a8, listed)
    tampered = dict(w8a8)
    layer = list(listed)[3]
    name = f"{layer}.weight_scale"
    tampered[name] = w8a8[name].clone()
    tampered[name][5] *= 2
    errors = weight_errors(model.state_dict(), tampered, listed)
    assert max(numbers["weight_channel_max"] for numbers in clean.values()) < 0.02
    assert errors[layer]["weight_channel_max"] == pytest.approx(1.0, abs=0.02)


def test_the_hooks_run_the_int8_model_and_measure_it(model, w8a8, listed):
    with torch.no_grad():
        with recorded_outputs(model, list(listed)) as reference:
            bf16 = model(IDS).logits
        with quantised_layers(model, stored_parts(w8a8, listed), listed, reference, MASK) as errors:
            int8 = model(IDS).logits
        assert torch.equal(model(IDS).logits, bf16), "the hooks must be gone"
    assert not torch.equal(int8, bf16)
    first = errors["model.layers.0.self_attn.q_proj"]
    assert first.local.relative == first.output.relative, "nothing was quantised before the first layer"
    last = errors["model.layers.1.mlp.down_proj"]
    assert 0 < last.local.relative < last.output.relative < 0.2
    assert 0.001 < first.input.relative < 0.02


def test_a_layer_computes_int8_linear_on_its_own_input(model, w8a8, listed):
    name = "model.layers.0.self_attn.q_proj"
    seen = []
    with (
        torch.no_grad(),
        quantised_layers(model, stored_parts(w8a8, listed), listed),
        recorded_outputs(model, [name]) as outputs,
    ):
        handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(IDS)
        handle.remove()
    expected = int8_linear(seen[0], w8a8[f"{name}.weight"], w8a8[f"{name}.weight_scale"])
    assert torch.equal(outputs[name][0], expected)


def test_the_cache_is_quantised_in_attention(model):
    with torch.no_grad():
        exact = model(IDS).logits.float().log_softmax(-1)
        with quantised_cache(model, INT4_KV, MASK) as errors:
            coarse = model(IDS).logits.float().log_softmax(-1)
        assert torch.equal(model(IDS).logits.float().log_softmax(-1), exact), "the attention must be restored"
    assert list(errors) == ["layer 0", "layer 1"]
    for layer in errors.values():
        assert 0.01 < layer.key.relative < 0.2
        assert 0.01 < layer.value.relative < 0.2
    assert 0 < (coarse - exact).abs().max() < 0.5


def test_rotated_attention_without_quantisation_is_plain_attention(model):
    exact_cache = dataclasses.replace(INT4_KV, encode=int4_kv.rotate, decode=lambda x: x.float())
    with torch.no_grad():
        exact = model(IDS).logits.float().log_softmax(-1)
        with quantised_cache(model, exact_cache):
            rotated = model(IDS).logits.float().log_softmax(-1)
    assert (rotated - exact).abs().max() < 0.03
