"""INT8 and FP8 caches against vLLM's kernels written anew in NumPy, and against values worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.precision import kv_caches
from score_centering.precision.registry import CACHES, cache_format_of


def vectors(seed: int) -> torch.Tensor:
    """(5, 32) bfloat16: a zero row, a tiny one, a constant, two of other magnitudes."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(5, 32)) * 2.0 ** rng.integers(-10, 12, size=(5, 1))
    made[0], made[1], made[2] = 0.0, made[1] * 1e-9, made[2, 0]
    return torch.from_numpy(made).to(torch.bfloat16)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_int8_entries_are_vllms(seed):
    """`_reshape_cache_per_token_head` of vLLM 0.25.0 for an INT8 cache, in float32."""
    x = vectors(seed)
    entries = kv_caches.encode_int8(x)
    assert entries.shape == (5, 36) and entries.dtype == torch.int8
    for row, entry in zip(x.float().numpy(), entries.numpy(), strict=True):
        scale = np.maximum(np.abs(row).max() / np.float32(127), np.float32(1e-6))
        scaled = row * (np.float32(1) / scale)
        codes = np.clip(np.where(scaled >= 0, scaled + np.float32(0.5), scaled - np.float32(0.5)), -128, 127)
        np.testing.assert_array_equal(entry[:32], codes.astype(np.int8))
        assert entry[32:].copy().view(np.float32)[0] == scale


def test_int8_by_hand():
    entries = kv_caches.encode_int8(torch.tensor([[127.0, -127.0, 2.5, -2.5, 0.4]]).to(torch.bfloat16))
    assert entries[0, :5].tolist() == [127, -127, 3, -3, 0]  # halves go away from zero
    assert kv_caches.decode_int8(entries).tolist() == [[127.0, -127.0, 3.0, -3.0, 0.0]]


def test_fp8_saturates_and_rounds_half_to_even():
    cache = cache_format_of("fp8")
    x = torch.tensor([[1000.0, -449.0, 1.0625, 0.2998046875]]).to(torch.bfloat16)
    assert cache.decode(cache.encode(x)).tolist() == [[448.0, -448.0, 1.0, 0.3125]]
    assert cache.narrow(torch.tensor([0.01])).float().tolist() == [0.009765625]  # probabilities are E4M3 too


ERRORS = {"auto": (0, 0), "int4_per_token_head": (0.04, 0.2), "int8_per_token_head": (1e-3, 0.02), "fp8": (0.01, 0.06)}


@pytest.mark.parametrize("name", CACHES)
def test_an_entry_stands_for_its_vector(name):
    cache, x = cache_format_of(name), vectors(3)
    assert cache.name == name
    entries = cache.encode(x)
    assert entries.dtype == cache.dtype and entries.shape == (5, cache.entry_size(32))
    assert kv_caches.cache_of(entries) is cache
    error = (cache.original(entries) - x.float()).norm(dim=-1)[3:] / x.float().norm(dim=-1)[3:]
    low, high = {
        "auto": (0, 0),
        "int4_per_token_head": (0.04, 0.2),
        "int8_per_token_head": (1e-3, 0.02),
        "fp8": (0.01, 0.06),
    }[name]
    assert (low <= error).all() and (error <= high).all()
    if not cache.rotated:
        numbers, scale = cache.read(entries)
        read = numbers.float() if scale is None else numbers.float() * scale.unsqueeze(-1)
        assert torch.equal(read, cache.decode(entries))
