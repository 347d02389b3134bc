import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.precision import int4_kv

HEAD_SIZES = [8, 32, 64, 128, 256]
SIZES = st.sampled_from(HEAD_SIZES)


def moderate(x: torch.Tensor) -> torch.Tensor:
    """Without the rows whose rotation could overflow float32."""
    return x[x.float().abs().amax(dim=1) < 1e30]


def round_half_away(value: np.float32) -> int:
    """Add or subtract 0.5 in float32 and truncate, as vLLM's kernel does; CUDA's conversion to int32 saturates."""
    shifted = value + np.float32(0.5) if value >= 0 else value - np.float32(0.5)
    return math.trunc(float(min(max(shifted, -(2.0**31)), 2.0**31)))


def vllm_vector(y: np.ndarray) -> tuple[list[int], np.float32, int]:
    """Codes, scale and zero point of one rotated float32 vector, element by element."""
    scale = max((y.max() - y.min()) / np.float32(15), np.float32(1e-6))
    zero = min(max(round_half_away(-y.min() / scale), 0), 15)
    inverse = np.float32(1) / scale
    codes = [min(max(round_half_away(value * inverse + np.float32(zero)), 0), 15) for value in y]
    return codes, scale, zero


@given(st.integers(0, 2**32 - 1), SIZES)
@settings(deadline=None, max_examples=60)
def test_codes_scale_and_zero_are_vllms(bf16_rows, seed, head_size):
    x = moderate(bf16_rows(seed, head_size))
    rotated = int4_kv.rotate(x)
    codes, scale, zero = int4_kv.quantise(rotated)
    for row in range(x.shape[0]):
        expected_codes, expected_scale, expected_zero = vllm_vector(rotated[row].float().numpy())
        assert codes[row].tolist() == expected_codes
        assert scale[row].item() == expected_scale and zero[row].item() == expected_zero


def test_quantise_by_hand():
    y = torch.tensor([[0.0, 15.0, 0.5, 1.5, 2.5, 7.0, 14.5, 3.25], [-8.0, 7.0, -7.5, -0.5, 0.5, 0.0, 1.0, 6.5]])
    codes, scale, zero = int4_kv.quantise(y)
    assert scale.tolist() == [1.0, 1.0] and zero.tolist() == [0, 8]
    assert codes.tolist() == [[0, 15, 1, 2, 3, 7, 15, 3], [0, 15, 1, 8, 9, 8, 9, 15]]  # halves away from zero


def test_zero_and_constant_vectors():
    codes, scale, zero = int4_kv.quantise(torch.tensor([[0.0] * 8, [2.0] * 8, [-2.0] * 8]))
    assert scale.tolist() == [pytest.approx(1e-6)] * 3
    assert zero.tolist() == [0, 0, 15]
    assert codes.tolist() == [[0] * 8, [15] * 8, [0] * 8]


@given(SIZES, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_unpack_inverts_pack(head_size, seed):
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 16, (3, 2, head_size), dtype=np.uint8))
    bits = rng.integers(0, 0x7F800000, (3, 2), dtype=np.int32)
    scale = torch.from_numpy(bits).view(torch.float32)
    zero = torch.from_numpy(rng.integers(0, 16, (3, 2), dtype=np.int32))
    packed = int4_kv.pack(codes, scale, zero)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, head_size // 2 + 4)
    codes_back, scale_back, zero_back = int4_kv.unpack(packed)
    assert torch.equal(codes_back, codes) and torch.equal(zero_back, zero)
    assert torch.equal(scale_back.view(torch.int32), scale.view(torch.int32) & ~0xF)
    assert torch.equal(int4_kv.pack(codes_back, scale_back, zero_back), packed)


@given(SIZES, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_pack_inverts_unpack(head_size, seed):
    packed = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (4, head_size // 2 + 4), dtype=np.uint8))
    assert torch.equal(int4_kv.pack(*int4_kv.unpack(packed)), packed)


def test_layout_byte_by_byte():
    codes = torch.arange(8, dtype=torch.uint8)
    packed = int4_kv.pack(codes, torch.tensor(1.0), torch.tensor(5, dtype=torch.int32))
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x05, 0x00, 0x80, 0x3F]
    even, odd, scale, zero = int4_kv.unpack_streams(packed)
    assert even.tolist() == [0, 2, 4, 6] and odd.tolist() == [1, 3, 5, 7]
    assert scale.item() == 1.0 and zero.item() == 5


def test_bytes_of_a_token_and_head():
    assert 2 * int4_kv.packed_bytes(256) == 264
    assert int4_kv.encode(torch.zeros(3, 4, 256, dtype=torch.bfloat16)).shape == (3, 4, 132)


@given(st.integers(0, 2**32 - 1), SIZES)
@settings(deadline=None, max_examples=40)
def test_rotation_is_the_signed_hadamard_matrix(bf16_rows, seed, head_size):
    x = moderate(bf16_rows(seed, head_size))
    signs = (
        2.0 * torch.bernoulli(torch.full((head_size,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9)) - 1
    )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < head_size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    exact = (x.double() * signs) @ matrix.T
    bound = 2.0**-20 * x.double().abs().sum(dim=1, keepdim=True)
    assert ((int4_kv.rotate(x.float()).double() - exact).abs() <= bound).all()
    back = int4_kv.unrotate(int4_kv.rotate(x.float()))
    assert ((back.double() - x.double()).abs() <= bound).all()
    assert torch.equal(int4_kv.rotate(x), int4_kv.rotate(x.float()).to(torch.bfloat16))


@given(st.integers(0, 2**32 - 1), SIZES)
@settings(deadline=None, max_examples=40)
def test_decoded_values_lie_within_a_step(bf16_rows, seed, head_size):
    x = moderate(bf16_rows(seed, head_size))
    rotated = int4_kv.rotate(x).float()
    _, scale, zero = int4_kv.quantise(rotated)
    decoded = int4_kv.decode(int4_kv.encode(x))
    in_range = (rotated.amin(-1) <= 0) & (rotated.amax(-1) >= 0)
    error = (decoded - rotated).abs().amax(-1)
    assert (error <= 1.01 * scale)[in_range].all()
    assert ((zero >= 0) & (zero <= 15)).all()


def test_a_nan_stays_visible():
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[0, 3] = float("nan")
    decoded = int4_kv.decode(int4_kv.encode(x))
    assert decoded[0].isnan().all() and not decoded[1].isnan().any()


def test_leading_shape_and_slices_of_a_larger_cache():
    x = torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cache = torch.zeros(2, 9, 3, int4_kv.packed_bytes(32), dtype=torch.uint8)
    cache[:, 2:7] = int4_kv.encode(x)
    assert torch.equal(int4_kv.decode(cache[:, 2:7]), int4_kv.decode(int4_kv.encode(x)))
    assert torch.equal(int4_kv.encode(x)[1, 4, 2], int4_kv.encode(x[1, 4, 2]))
    assert torch.equal(int4_kv.encode(x.transpose(1, 2)), int4_kv.encode(x).transpose(1, 2))


@pytest.mark.parametrize("head_size", [1, 4, 20, 31, 96])
def test_other_head_sizes_are_refused(head_size):
    with pytest.raises(ValueError, match=f"head size {head_size}, allowed: powers of two from 8 on"):
        int4_kv.encode(torch.zeros(1, head_size))
    with pytest.raises(ValueError, match="allowed: powers of two"):
        int4_kv.packed_bytes(head_size)
