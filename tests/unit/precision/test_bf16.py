"""BF16 arithmetic through FP32 products, against transformers' own layers and float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from score_centering.precision.bf16 import attend, causal_depthwise_conv, gated_delta_rule, install_cpu_kernels, linear


def qwen(seed: int = 0) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(config)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_model_and_gradients_equal_transformers_in_fp32(length):
    reference = qwen()
    fast = copy.deepcopy(reference)
    install_cpu_kernels(fast)
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
    outputs = [net(input_ids=ids, use_cache=False).logits for net in (reference, fast)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    for output in outputs:
        output.logsumexp(-1).mean().backward()
    for (name, expected), found in zip(reference.named_parameters(), fast.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 2e-3 * expected.grad.norm() + 1e-6, name


def test_padding_on_the_right_never_reaches_the_tokens_before_it():
    net = qwen().bfloat16()
    install_cpu_kernels(net)
    ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([ids, torch.full((1, 13), 7)], dim=1)
    alone = net(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(net(input_ids=padded, use_cache=False).logits[:, :20], alone, rtol=0, atol=0.04)


def test_attention_is_rounded_once():
    """Two query heads on one key head, causal: transformers' FP32 result of the same BF16 numbers, rounded to BF16."""
    net = qwen()
    install_cpu_kernels(net)
    layer = next(layer.self_attn for layer in net.model.layers if hasattr(layer, "self_attn"))
    query, key, value = torch.randn(2 + 1 + 1, 3, 9, 16).bfloat16().split([2, 1, 1])
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    found, _ = attend(layer, query, key, value, None, scaling=0.25)
    scores = (query.double() @ key.double().transpose(-1, -2)) * 0.25
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    exact = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 24), st.integers(1, 16))
def test_linear_is_the_exact_product_rounded_once(seed, rows, inner, outer):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).bfloat16()
    weight = torch.randn(outer, inner, generator=generator).bfloat16()
    exact = x.double() @ weight.double().t()
    found = linear(x, weight)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + inner * 1e-6).all()


def test_linear_gradients():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator, requires_grad=True)
    weight = torch.randn(3, 7, generator=generator, requires_grad=True)
    linear(x, weight).square().sum().backward()
    expected = torch.autograd.grad((x @ weight.t()).square().sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


def test_convolution_equals_conv1d():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 9, 6, generator=generator), torch.randn(6, 4, generator=generator)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=6)).transpose(1, 2)
    torch.testing.assert_close(causal_depthwise_conv(x, weight), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 70), st.sampled_from([4, 16, 64]))
def test_delta_rule_equals_the_recurrence_for_any_chunk(seed, length, chunk):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, 3, 8, generator=generator) for _ in range(3))
    g = -torch.rand(2, length, 3, generator=generator) * 2
    beta = torch.rand(2, length, 3, generator=generator)
    expected, _ = torch_recurrent_gated_delta_rule(q, k, v, g, beta, None, False, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(q, k, v, g, beta, chunk), expected, rtol=1e-3, atol=1e-4)


def test_a_cache_is_refused():
    net = qwen()
    install_cpu_kernels(net)
    with pytest.raises(ValueError, match="takes whole sequences, no cache"):
        net(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=True)
