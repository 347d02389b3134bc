"""The Triton kernels give the CPU path's bits, also from a replayed CUDA graph and with poisoned memory around."""

import pytest
import torch

from score_centering.precision import int4_kv, int8_linear, quantise_activation, quantise_weight, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.int8 import quantise_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rows(n_rows: int, n_columns: int, seed: int = 0) -> torch.Tensor:
    """BF16 rows of many magnitudes; a zero row, subnormal ones, one near the largest BF16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_columns, generator=generator) * torch.exp(4 * torch.randn(n_rows, 1, generator=generator))
    for row, magnitude in enumerate((0.0, 1e-40, 1e-38, 1e-33, 1e37)[: n_rows - 1]):
        x[row] = magnitude * torch.randn(n_columns, generator=generator)
    return x.to(torch.bfloat16)


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    torch.full((1 << 26,), float("nan"), device="cuda")


def same(gpu: torch.Tensor, cpu: torch.Tensor) -> bool:
    return gpu.dtype == cpu.dtype and torch.equal(gpu.cpu(), cpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 7), (33, 576), (5, 4096), (9, 12288)])
def test_activation_codes(shape, dtype):
    x = rows(*shape).to(dtype)
    poison()
    for gpu, cpu in zip(quantise_activation(x.cuda()), quantise_activation(x), strict=True):
        assert same(gpu, cpu)


def test_activation_keeps_a_nan_visible():
    x = rows(4, 64)
    x[2, 5] = float("nan")
    _, scale = quantise_activation(x.cuda())
    assert scale.isnan().flatten().tolist() == [False, False, True, False]


def test_weight_codes():
    weights = [rows(70, 576, 1), rows(40, 4096, 2), rows(70, 576, 3), rows(16, 12288, 4), rows(8, 33, 5)]
    poison()
    for gpu, weight in zip(quantise_weights([weight.cuda() for weight in weights]), weights, strict=True):
        codes, scale = quantise_weight(weight)
        assert same(gpu[0], codes) and same(gpu[1], scale)


def test_weight_in_the_middle_of_a_flat_buffer():
    flat = rows(1, 1 + 32 * 64, 10)[0]
    weight = flat[1:].view(32, 64)
    codes, scale = quantise_weight(flat.cuda()[1:].view(32, 64))
    expected_codes, expected_scale = quantise_weight(weight)
    assert same(codes, expected_codes) and same(scale, expected_scale)


def test_requantise():
    weights = {"a.weight": rows(70, 576, 1), "norm.weight": rows(1, 8), "b.weight": rows(40, 256, 2)}
    on_gpu = {name: weight.cuda() for name, weight in weights.items()}
    listed = dict.fromkeys(["a", "b"], INT8)
    gpu, cpu = requantise(on_gpu, listed), requantise(weights, listed)
    assert list(gpu) == list(cpu) and all(same(gpu[name], cpu[name]) for name in cpu)
    assert gpu["norm.weight"] is on_gpu["norm.weight"]
    on_gpu["b.weight"][3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"b\.weight holds a NaN"):
        requantise(on_gpu, listed)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 128, 64), (5, 100, 36), (17, 576, 1536), (200, 1536, 576), (3, 4096, 40)])
def test_linear(shape, with_bias):
    n_rows, n_in, n_out = shape
    x, weight = rows(n_rows, n_in, 6)[None], rows(n_out, n_in, 7)
    weight[:5] = rows(9, n_in, 8)[5:6]
    bias = rows(9, n_out, 9)[7] if with_bias else None
    codes, scale = quantise_weight(weight)
    poison()
    gpu = int8_linear(x.cuda(), codes.cuda(), scale.cuda(), None if bias is None else bias.cuda())
    assert same(gpu, int8_linear(x, codes, scale, bias))


@pytest.mark.parametrize("head_size", [8, 32, 64, 128, 256])
def test_int4_cache(head_size):
    x = (rows(93, head_size, head_size) / 1024)[:, None].expand(-1, 3, -1)
    poison()
    gpu = x.cuda()
    assert same(int4_kv.rotate(gpu), int4_kv.rotate(x))
    assert same(int4_kv.unrotate(gpu), int4_kv.unrotate(x))
    packed = int4_kv.encode(x)
    assert same(int4_kv.encode(gpu), packed)
    assert same(int4_kv.decode(packed.cuda()), int4_kv.decode(packed))


@pytest.mark.parametrize("n_rows", [1, 27, 93, 279, 4099])
def test_int4_cache_repeats_with_poisoned_memory(n_rows):
    x = torch.randn(n_rows, 256, generator=torch.Generator().manual_seed(n_rows)).to(torch.bfloat16)
    expected = int4_kv.encode(x)
    for _ in range(5):
        poison()
        assert same(int4_kv.encode(x.cuda()), expected)


def test_replay_of_a_cuda_graph():
    codes, scale = (tensor.cuda() for tensor in quantise_weight(rows(64, 256, 11)[8:]))
    x = rows(21, 256, 12)[5:].cuda()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = int8_linear(x, codes, scale).view(16, 7, 8)
        packed = int4_kv.encode(y)
        return packed, int4_kv.unrotate(int4_kv.decode(packed))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    x.copy_(rows(21, 256, 13)[5:])
    graph.replay()
    for graph_result, eager_result in zip(replayed, step(), strict=True):
        assert torch.equal(graph_result, eager_result)
