import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.precision import int8, int8_linear, quantise_activation, quantise_weight
from score_centering.precision.int8 import EXACT_BLOCK, dequantise_weight, int8_matmul

CHANNEL = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)


def vllm_activation(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """vLLM's dynamic_scaled_int8_quant for one float32 row, in NumPy's float32; the CUDA conversion saturates."""
    absmax = np.abs(row).max()
    with np.errstate(all="ignore"):
        inverse = np.float32(0) if absmax == 0 else np.float32(127) / absmax
        scaled = np.nan_to_num(np.rint(row * inverse), nan=0.0)
    return np.clip(scaled, -128, 127).astype(np.int8), absmax / np.float32(127)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(deadline=None, max_examples=60)
def test_activation_codes_and_scales_are_vllms(bf16_rows, seed, n_in, dtype):
    x = bf16_rows(seed, n_in)
    codes, scale = quantise_activation(x.to(dtype))
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (x.shape[0], 1)
    for row in range(x.shape[0]):
        expected_codes, expected_scale = vllm_activation(x[row].float().numpy())
        np.testing.assert_array_equal(codes[row].numpy(), expected_codes)
        assert scale[row].item() == expected_scale


def test_activation_by_hand():
    codes, scale = quantise_activation(torch.tensor([[127.0, -127.0, 2.5, 3.5, -2.5], [0.0] * 5]))
    assert codes.tolist() == [[127, -127, 2, 4, -2], [0] * 5]  # halves go to even
    assert scale.tolist() == [[1.0], [0.0]]


def test_activation_keeps_a_nan_visible():
    _, scale = quantise_activation(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
    assert scale.isnan().tolist() == [[True], [False]]


def test_activation_takes_any_leading_shape():
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    codes, scale = quantise_activation(x)
    flat_codes, flat_scale = quantise_activation(x.reshape(6, 16))
    assert torch.equal(codes.reshape(6, 16), flat_codes) and torch.equal(scale.reshape(6, 1), flat_scale)


@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
@settings(deadline=None, max_examples=80)
def test_weight_codes_and_scales_are_compressed_tensors(bf16_rows, seed, n_in):
    weight = bf16_rows(seed, n_in)
    codes, scale = quantise_weight(weight)
    low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    expected_scale, zero = calculate_qparams(low, high, CHANNEL)
    expected = quantize(weight, expected_scale, zero, CHANNEL, dtype=torch.int8)
    assert scale.dtype == torch.bfloat16 and torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected)


def test_weight_by_hand():
    codes, scale = quantise_weight(torch.tensor([[127.5, -127.5, 0.5, 1.5], [0.0] * 4], dtype=torch.bfloat16))
    assert codes.tolist() == [[127, -128, 0, 2], [0] * 4]
    assert scale.tolist() == [[1.0], [2.0**-7]]
    assert dequantise_weight(codes, scale).tolist() == [[127.0, -128.0, 0.0, 2.0], [0.0] * 4]


@pytest.mark.parametrize("weight", [torch.zeros(2, 4), torch.zeros(4, dtype=torch.bfloat16)])
def test_weight_of_another_kind_is_refused(weight):
    with pytest.raises(ValueError, match=r"must be a bfloat16 matrix \(out, in\)"):
        quantise_weight(weight)


def test_reciprocal_gives_the_quotient_after_bf16_rounding():
    """The Triton kernel multiplies by 1 / scale; all pairs of BF16 significands show that this changes no code."""
    significands = (128 + torch.arange(128, dtype=torch.float32)).to(torch.bfloat16).float()
    quotient = significands[:, None] / significands[None, :]
    product = significands[:, None] * (1.0 / significands)[None, :]
    assert torch.equal(quotient.to(torch.bfloat16), product.to(torch.bfloat16))
    assert not torch.equal(quotient, product)


@pytest.fixture(params=[True, False], ids=["int8_product", "fp32_gemms"])
def cpu_product(request, monkeypatch):
    """Both ways of a CPU; torch has a plain INT8 product for those that lack the instruction."""
    monkeypatch.setattr(int8, "INT8_PRODUCT", request.param)


@pytest.mark.parametrize("n_in", [1, 128, EXACT_BLOCK, EXACT_BLOCK + 1, 3 * EXACT_BLOCK + 5])
@pytest.mark.usefixtures("cpu_product")
def test_matmul_is_exact(n_in):
    generator = torch.Generator().manual_seed(n_in)
    x = torch.randint(-128, 128, (3, n_in), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (300, n_in), generator=generator, dtype=torch.int8)
    x[0], weight[0], weight[1] = -128, -128, 127  # the largest sums there are
    expected = x.long() @ weight.long().T
    assert torch.equal(int8_matmul(x, weight), expected.float())


@pytest.mark.usefixtures("cpu_product")
def test_matmul_rounds_sums_above_24_bits_once():
    n_in = 2 * EXACT_BLOCK
    x, weight = torch.full((1, n_in), 127, dtype=torch.int8), torch.full((1, n_in), 127, dtype=torch.int8)
    x[0, -1], weight[0, -1] = 1, 2
    total = 127 * 127 * (n_in - 1) + 2
    assert total > 2**24 and int8_matmul(x, weight).item() == np.float32(total)


@pytest.mark.usefixtures("cpu_product")
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_scales_in_vllms_order(with_bias):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 96, generator=generator).to(torch.bfloat16)
    weight = torch.randn(40, 96, generator=generator).to(torch.bfloat16)
    bias = torch.randn(40, generator=generator).to(torch.bfloat16) if with_bias else None
    codes, scale = quantise_weight(weight)
    y = int8_linear(x, codes, scale, bias)
    x_codes, x_scale = quantise_activation(x)
    total = (x_codes.long() @ codes.long().T).float()
    expected = ((x_scale * total) * scale.float().T).to(torch.bfloat16)
    if bias is not None:
        expected = expected + bias
    assert y.dtype == torch.bfloat16 and y.shape == (2, 5, 40) and torch.equal(y, expected)


@pytest.mark.usefixtures("cpu_product")
def test_linear_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(33, 200, generator=generator).to(torch.bfloat16)
    codes, scale = quantise_weight(torch.randn(70, 200, generator=generator).to(torch.bfloat16))
    assert torch.equal(int8_linear(x, codes, scale)[7:9], int8_linear(x[7:9], codes, scale))
