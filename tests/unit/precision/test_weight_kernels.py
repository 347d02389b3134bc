"""The Triton kernels that quantise weights give the CPU path's bytes, run by Triton's interpreter on a CPU.

By hand, where triton is installed: TRITON_INTERPRET=1 pytest tests/unit/precision/test_weight_kernels.py. Compiled
kernels are tested by tests/gpu/test_formats_gpu.py.
"""

import importlib.util
import os

import numpy as np
import pytest
import torch

from score_centering.precision import fp4
from score_centering.precision.format import name_parts
from score_centering.precision.registry import FORMATS, format_of

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton and TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
import triton_interpreter

from score_centering.precision import weight_kernels

triton_interpreter.mend()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows that a GPU does silently

SHAPES = [(6, 256), (3, 128), (6, 256), (33, 384), (1, 4352)]


def matrices(seed: int, shapes: list[tuple[int, int]] = SHAPES, spread: int = 30) -> dict[str, torch.Tensor]:
    """Zero rows and groups, −0, constants, ties, and every magnitude of bfloat16 among normal ones."""
    rng = np.random.default_rng(seed)
    made = {}
    for index, (n_out, n_in) in enumerate(shapes):
        values = rng.normal(size=(n_out, n_in)) * 2.0 ** rng.integers(-spread, spread, size=(n_out, 1))
        values *= np.where(rng.random((n_out, n_in)) < 0.01, 30.0, 1.0)
        values[rng.random((n_out, n_in)) < 0.02] = -0.0
        values[0, :128] = 0.0
        if n_out > 2:
            values[1] = values[1, 0]
            values[2] = rng.integers(-15, 16, n_in) * 0.5  # ties of INT4 and E2M1
        made[f"m{index}"] = torch.from_numpy(values).to(torch.bfloat16)
    return made


def any_bits(seed: int) -> dict[str, torch.Tensor]:
    """Rows of any finite bits, subnormal numbers included."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 0x7F80, (8, 256), dtype=np.uint16) | rng.integers(0, 2, (8, 256), dtype=np.uint16) << 15
    bits[:3] &= 0x80FF  # subnormal, or next to it
    return {"any": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}


def through_kernels(monkeypatch, name, weights):
    for module in ("fp8", "int4", "fp4", "mxfp8"):
        monkeypatch.setattr(f"score_centering.precision.{module}.on_cuda", lambda _: True)
    if name == "int8":
        made = weight_kernels.by_channel(format_of(name), list(weights.values()), "int8", 127.5)
        return name_parts(format_of(name), weights, made)
    return format_of(name).quantise(weights)


def differing(kernel, cpu):
    wrong = {}
    for layer, parts in cpu.items():
        for part, expected in parts.items():
            found = kernel[layer][part]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            count = (found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum().item()
            if count:
                wrong[layer, part] = count
    return wrong


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_the_cpus(name, seed, monkeypatch):
    weights = matrices(seed, spread=(3, 30)[seed % 2])
    expected = format_of(name).quantise(weights)
    assert not differing(through_kernels(monkeypatch, name, weights), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_any_bits_are_the_cpus(name, seed, monkeypatch):
    weights = any_bits(seed)
    expected = format_of(name).quantise(weights)
    assert not differing(through_kernels(monkeypatch, name, weights), expected)


@pytest.mark.parametrize("exponent", [-140, -118, -115, -110, -60, -40, 0, 12, 30, 100])
def test_nvfp4_of_matrices_of_one_magnitude(exponent, monkeypatch):
    weights = {
        name: (weight.double() * 2.0**exponent).to(torch.bfloat16) for name, weight in matrices(0, spread=1).items()
    }
    expected = format_of("nvfp4").quantise(weights)
    assert not differing(through_kernels(monkeypatch, "nvfp4", weights), expected)


@pytest.mark.parametrize("n_in", [1, 9, 33, 100])
def test_channels_of_any_length(n_in, monkeypatch):
    weights = {"layer": matrices(1, [(5, 128)])["m0"][:, 128 - n_in :].contiguous()}
    for name in ("int8", "fp8", "int4_channel"):
        expected = format_of(name).quantise(weights)
        with monkeypatch.context() as patch:
            assert not differing(through_kernels(patch, name, weights), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_visible(name, value, monkeypatch):
    weights = matrices(3, [(4, 256), (4, 256)])
    weights["m1"][3, 200] = value
    stored = through_kernels(monkeypatch, name, weights)
    visible = [bool(torch.isfinite(format_of(name).witness(parts).float()).all()) for parts in stored.values()]
    assert visible == [True, False]


def test_absmax_by_hand():
    weights = [
        torch.tensor(rows, dtype=torch.bfloat16) for rows in ([[1.0, -3.0]], [[-0.0, 0.0]], [[2.0, float("nan")]])
    ]
    weights.insert(1, torch.full((2, 20000), -7.0, dtype=torch.bfloat16))
    largest = weight_kernels.absmax(weights)
    assert largest[:3].tolist() == [3.0, 7.0, 0.0] and largest[3].isnan()


def test_joined_layers_share_the_largest():
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "b.gate_proj"]
    absmax = torch.tensor([1.0, 4.0, 2.0, 8.0], dtype=torch.bfloat16)
    assert fp4.shared_absmax(names, absmax).tolist() == [4.0, 4.0, 4.0, 8.0]


@triton.jit
def _apply(x_ptr, y_ptr, out_ptr, KIND: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + places), tl.load(y_ptr + places)
    if KIND == "quotient":  # noqa: SIM108
        out = weight_kernels._quotient(x, y)
    else:
        out = weight_kernels._e4m3_of_any(x).to(tl.float32)
    tl.store(out_ptr + places, out)


def applied(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _apply[(1,)](x, y, out, KIND=kind, SIZE=x.numel())
    return out


def test_a_quotient_is_rounded_once():
    """All significands of bfloat16 over random float32 divisors: NumPy's division."""
    rng = np.random.default_rng(0)
    x = np.tile(np.arange(128, 256, dtype=np.float32), 512) * np.float32(2.0) ** rng.integers(-20, 20, 65536)
    divisor = rng.uniform(1, 2, 65536).astype(np.float32) * np.float32(2.0) ** rng.integers(-20, 9, 65536)
    x, divisor = x.astype(np.float32), divisor.astype(np.float32)
    found = applied("quotient", torch.from_numpy(x), torch.from_numpy(divisor))
    np.testing.assert_array_equal(found.numpy(), x / divisor)


def test_scales_next_to_ties_are_rounded_once():
    """Next to every tie of E4M3, below 2**-6 too: torch's own cast."""
    numbers = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [ties, *(torch.nextafter(ties, torch.full_like(ties, side)) for side in (0.0, 1e9)), numbers]
    x = torch.cat(near)
    x = torch.nn.functional.pad(x, (0, 512 - len(x)))
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8).float()
    assert torch.equal(applied("scale", x, x), expected)
