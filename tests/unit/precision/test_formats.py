"""Every number format against compressed-tensors' own arithmetic, and against values worked out by hand."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from score_centering.precision import fp4, fp8, int4, mxfp8
from score_centering.precision.registry import FORMATS, Precision, format_of, precision_labels
from score_centering.precision.requantising import identify, listed_linears, requantise
from score_centering.settings import UserError

SIZE = 256  # input features that every format's groups divide


def weights(seed: int, rows: int = 6) -> torch.Tensor:
    """(rows, SIZE) bfloat16: a zero row, a zero group, a constant, magnitudes from 2**-30 to 2**20, 1 % outliers."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(rows, SIZE)) * 2.0 ** rng.integers(-30, 20, size=(rows, 1))
    made *= np.where(rng.random((rows, SIZE)) < 0.01, 30.0, 1.0)
    made[0], made[1, :128], made[2] = 0.0, 0.0, made[2, 0]
    return torch.from_numpy(made).to(torch.bfloat16)


def compressed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores of `weight`: its scales, its quantisation, its packing."""
    used = format_of(name)
    scheme = QuantizationScheme(targets=["Linear"], **used.scheme)
    arguments = scheme.weights
    groups = weight.unflatten(1, (-1, arguments.group_size or SIZE))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    state = {"weight": weight}
    whole = None
    if arguments.strategy == "tensor_group":
        whole = generate_gparam(low.amin(), high.amax())
        state["weight_global_scale"] = whole
    scale, zero = calculate_qparams(low, high, arguments, global_scale=whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    return BaseCompressor.get_value_from_registry(used.compressor).compress(state, scheme)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_weights_are_stored_as_compressed_tensors_stores_them(name, seed):
    weight = weights(seed)
    ours, theirs = format_of(name).quantise({"layer": weight})["layer"], compressed(name, weight)
    assert set(ours) <= set(theirs)
    assert all(same_bytes(ours[part], theirs[part]) for part in ours), [
        part for part in ours if not same_bytes(ours[part], theirs[part])
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_the_stored_tensors_are_those_that_are_declared(name):
    used, weight = format_of(name), weights(1)
    stored = used.quantise({"layer": weight})["layer"]
    declared = used.stored(*weight.shape)
    assert tuple(stored) == tuple(declared) == used.parts
    for part, kind in declared.items():
        assert (tuple(stored[part].shape), stored[part].dtype) == (kind.shape, kind.dtype)
        assert kind.nbytes == stored[part].nbytes


@pytest.mark.parametrize(
    ("name", "stored_bytes"),
    # by hand, of a weight of 4 rows and 256 columns: codes, scales, what else is stored
    [("int8", 1024 + 8), ("fp8", 1024 + 8), ("int4", 512 + 16 + 16), ("int4_channel", 512 + 8 + 16),
     ("nvfp4", 512 + 64 + 4), ("mxfp8", 1024 + 32)],
)  # fmt: skip
def test_stored_bytes_by_hand(name, stored_bytes):
    assert sum(kind.nbytes for kind in format_of(name).stored(4, 256).values()) == stored_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_weight_errs_within_its_range(name):
    used = format_of(name)
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    stored = used.quantise({"layer": weight})["layer"]
    error = (used.dequantise(stored) - weight.double()).norm() / weight.double().norm()
    assert used.weight_error[0] < error < used.weight_error[1]


@pytest.mark.parametrize("name", FORMATS)
def test_what_an_engine_holds_is_what_is_stored(name):
    """Values and scale stand for the dequantised weight; only INT4's product rounds code · scale to BF16 on the way."""
    used, weight = format_of(name), weights(2)
    stored = used.quantise({"layer": weight})["layer"]
    values, scale = used.hold(stored)
    assert values.dtype in (torch.int8, torch.bfloat16) and (scale is not None) == used.has_scale
    held = values.double() * (1.0 if scale is None else scale.double())
    tolerance = 2.0**-8 if name.startswith("int4") else 1e-6
    assert torch.allclose(held, used.dequantise(stored), rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer_is_the_product_of_what_it_quantises(name):
    used, weight = format_of(name), weights(3, rows=40) * 2.0**-4
    x = weights(4, rows=9)
    stored = used.quantise({"layer": weight})["layer"]
    expected = used.quantise_input(x) @ used.dequantise(stored).T
    found = used.linear(x, stored)
    assert found.dtype == torch.bfloat16 and found.shape == (9, 40)
    bound = (
        used.quantise_input(x).abs() @ used.dequantise(stored).abs().T
    )  # a sum cancels: the error is that of its terms
    assert ((found.double() - expected).abs() <= 2.0**-7 * bound + 1e-30).all()
    bias = torch.arange(40).to(torch.bfloat16)
    assert torch.equal(used.linear(x[None], stored, bias), (found + bias)[None])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(name, value):
    before = {"a.weight": weights(5), "b.weight": weights(6)}
    before["b.weight"][3, 7] = value
    with pytest.raises(ValueError, match=r"requantise: b\.weight holds a NaN or an infinite value"):
        requantise(before, dict.fromkeys(["a", "b"], format_of(name)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_by_its_configuration(name):
    used = format_of(name)
    config = {"quantization_config": used.quantization_config(["Linear"], ["lm_head"])}
    assert identify(config) is used
    assert listed_linears(config, nn.Sequential(nn.Linear(SIZE, 8))) == {"0": used}


@pytest.mark.parametrize(("name", "group"), [("int4", 128), ("nvfp4", 16), ("mxfp8", 32)])
def test_groups_that_do_not_divide_are_refused(name, group):
    config = {"quantization_config": format_of(name).quantization_config(["Linear"], [])}
    with pytest.raises(UserError, match=f"0 can't be quantised: {name}: 200 input features, groups of {group} must"):
        listed_linears(config, nn.Sequential(nn.Linear(200, 8)))


def test_an_unknown_compressor_is_refused_with_the_list():
    scheme = format_of("int8").quantization_config(["Linear"], []) | {"format": "marlin-24"}
    with pytest.raises(UserError, match=r"format = 'marlin-24', allowed are float-quantized, int-quantized, mxfp8-"):
        identify({"quantization_config": scheme})


def test_every_precision_has_a_name_of_its_own():
    names = [Precision(q, cache).name for q in (None, *FORMATS) for cache in ("auto", "int4_per_token_head")]
    assert len(set(names)) == len(names) and set(names) <= precision_labels().keys()
    assert Precision(None, "auto").name == "bf16" and Precision("fp8", "int4_per_token_head").name == "fp8_int4kv"
    assert Precision("fp8", "int4_per_token_head").label == "FP8 + INT4 KV"


# ------------------------------------------------------------------------------------------------------------- by hand
def test_fp8_activations_by_hand():
    codes, scale = fp8.quantise_rows(torch.tensor([[448.0, -1.0625, 0.3, 0.0], [0.0] * 4]))
    assert scale.tolist() == [[1.0], [pytest.approx(1 / (448 * 512))]]
    # 1.0625 lies between 1 and 1.125: to the even code; 0.3 between 0.28125 and 0.3125
    assert codes.tolist() == [[448.0, -1.0, 0.3125, 0.0], [0.0] * 4]


def e4m3(value: float) -> float:
    """The nearest E4M3 number of |value| ≤ 448, halves to the even mantissa: 3 mantissa bits, subnormal below 2**-6."""
    step = 2.0 ** (max(np.floor(np.log2(abs(value))), -6.0) - 3) if value else 1.0
    return float(np.round(value / step) * step)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_fp8_activations_are_vllms(seed, n_in):
    """vLLM's `dynamic_per_token_scaled_fp8_quant`, written anew in NumPy's float32."""
    x = weights(seed)[:, :n_in]
    codes, scale = fp8.quantise_rows(x)
    for row, found, found_scale in zip(x.float().numpy(), codes.numpy(), scale.numpy(), strict=True):
        expected = np.maximum(np.abs(row).max() / np.float32(448), np.float32(1 / (448 * 512)))
        assert found_scale[0] == expected
        scaled = np.clip(row / expected, np.float32(-448), np.float32(448))
        np.testing.assert_array_equal(found, [e4m3(float(value)) for value in scaled])


def test_a_row_with_a_nan_stays_visible_in_fp8():
    assert fp8.quantise_rows(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))[1].isnan().tolist() == [[True], [False]]


def test_int4_by_hand():
    weight = torch.tensor([[7.5, -7.5, 0.5, 1.5, 2.5, -8.0, 0.0, 3.0, 1.0]], dtype=torch.bfloat16)
    weight[0, 5] = 0.0
    codes, scale = int4.quantise_weight(weight, 9)
    assert scale.tolist() == [[1.0]]
    assert codes.tolist() == [[7, -8, 0, 2, 2, 0, 0, 3, 1]]  # 7.5 rounds to 8 and is clamped before; halves go to even
    packed = int4.pack(codes)
    # code + 8 in nibbles, the first lowest: f 0 8 a a 8 8 b, then 9
    assert [value & 0xFFFFFFFF for value in packed[0].tolist()] == [0xB88AA80F, 0x9]
    assert torch.equal(int4.unpack(packed, 9), codes)


def test_nvfp4_by_hand():
    weight = torch.zeros(1, 16, dtype=torch.bfloat16)
    weight[0, :6] = torch.tensor([6.0, -1.25, 1.75, 0.25, -0.2, 5.0])
    whole = fp4.matrix_scale(weight.abs().amax(dim=1))
    assert whole.tolist() == [448.0]  # 448 · 6 / 6
    numbers, scale = fp4.quantise_weight(weight, whole)
    assert scale.float().tolist() == [[448.0]]  # so that scale / whole is 1
    assert numbers[0, :6].tolist() == [6.0, -1.0, 2.0, 0.0, -0.0, 4.0]  # ties to the even code
    assert fp4.pack(numbers)[0, :3].tolist() == [0x7 | 0xA << 4, 0x4 | 0x0 << 4, 0x8 | 0x6 << 4]
    assert torch.equal(fp4.unpack(fp4.pack(numbers)).float(), numbers)


def test_layers_that_vllm_joins_share_nvfp4s_matrix_scale():
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.up_proj", "b.gate_proj", "c.up_proj"]
    assert fp4.groups_of(names) == [names[:3], ["a.o_proj"], ["b.up_proj", "b.gate_proj"], ["c.up_proj"]]
    made = format_of("nvfp4").quantise({name: weights(i) for i, name in enumerate(names)})
    scales = {name: stored["weight_global_scale"].item() for name, stored in made.items()}
    assert scales["a.q_proj"] == scales["a.k_proj"] == scales["a.v_proj"] != scales["a.o_proj"]


def test_mxfp8_by_hand():
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([256.0, -1.0, 3.0])
    x[0, 32] = 1.75  # from 1.75 · 2ⁿ on the power is the next one, or 448 would not hold it
    codes, exponent = mxfp8.quantise(x)
    assert exponent.tolist() == [[127, 127 + 1 - 8]]
    assert codes[0, :3].float().tolist() == [256.0, -1.0, 3.0] and codes[0, 32].float() == 224.0
    assert torch.equal(mxfp8.decode(codes, exponent), x)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_mxfp8_activations_are_compressed_tensors(seed):
    x = weights(seed)
    arguments = QuantizationScheme(targets=["Linear"], **format_of("mxfp8").scheme).input_activations
    scale, _ = compute_dynamic_scales_and_zp(x, arguments, module=None)
    assert torch.equal(mxfp8.powers(mxfp8.quantise(x)[1]), scale)
