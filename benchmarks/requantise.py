"""Requantising after an update, at the linear-layer shapes of a 9 B Qwen3.5, against the bytes it must move.

The floor is reading every BF16 weight and writing every INT8 code once: the faster of a device copy's bandwidth and an
elementwise cast of the same tensors, both measured in the same run. On a CPU the rival is compressed-tensors' own
arithmetic, and `--quick` has fewer and smaller layers.
"""

import statistics
import time
from collections.abc import Callable

import torch
from _common import parse_args, report
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.precision import listed_linears, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.int8 import quantise_weight

FLOOR_LIMIT = 1.5
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}


def linear_shapes(config: Qwen3_5TextConfig) -> dict[str, torch.Size]:
    """Shape (out, in) of each quantised linear layer, by name."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    return {name: model.get_submodule(name).weight.shape for name in listed_linears(W8A8, model)}


def random_weights(shapes: dict[str, torch.Size], device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        f"{name}.weight": (0.02 * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def wall_seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median wall time of `run` to its last result, after one warm-up: what a sync waits for, host work included."""
    run()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def eager(weights: dict[str, Tensor]) -> None:
    """The CPU path's operations one by one, without the fused kernel."""
    for weight in weights.values():
        scale = weight.abs().amax(dim=1, keepdim=True) / torch.full((), 127.5, dtype=weight.dtype, device=weight.device)
        scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
        (weight / scale).clamp_(-128, 127).round_().to(torch.int8)


def compressed_tensors(weights: dict[str, Tensor]) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
    for weight in weights.values():
        low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
        scale, zero = calculate_qparams(low, high, args)
        quantize(weight, scale, zero, args, dtype=torch.int8)


def cast_seconds(weights: dict[str, Tensor], device: str, repeats: int) -> float:
    """Reading every BF16 weight and writing one INT8 for it, by torch's elementwise cast."""
    codes = {name: torch.empty_like(weight, dtype=torch.int8) for name, weight in weights.items()}
    return wall_seconds(lambda: [codes[name].copy_(weight) for name, weight in weights.items()], device, repeats)


def copy_bandwidth(elements: int, device: str, repeats: int) -> float:
    """Bytes read and written a second by a copy of as many bytes as the INT8 weights have."""
    source = torch.ones(elements // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / wall_seconds(lambda: target.copy_(source), device, repeats)


def codes_unlike_cpu(weights: dict[str, Tensor], quantised: dict[str, Tensor]) -> int:
    """Codes and scales that differ from the CPU path's, on one layer of each shape."""
    one_of_each = {weight.shape: name for name, weight in weights.items()}.values()
    different = 0
    for name in one_of_each:
        codes, scale = quantise_weight(weights[name].cpu())
        different += int((quantised[name].cpu() != codes).sum()) + int(
            (quantised[f"{name}_scale"].cpu() != scale).sum()
        )
    return different


def main() -> None:
    arguments = parse_args(__doc__)
    device, cuda = arguments.device, arguments.device == "cuda"
    config = Qwen3_5TextConfig()
    if arguments.quick:
        config = Qwen3_5TextConfig(
            num_hidden_layers=4, **({} if cuda else {"hidden_size": 512, "intermediate_size": 1536})
        )
    weights = random_weights(linear_shapes(config), device)
    layers = {name.removesuffix(".weight"): INT8 for name in weights}
    elements = sum(weight.numel() for weight in weights.values())
    repeats = 3 if arguments.quick else 20

    cast = cast_seconds(weights, device, repeats)
    bandwidth = copy_bandwidth(elements, device, repeats)
    floor = min(cast, 3 * elements / bandwidth)
    ours = wall_seconds(lambda: requantise(weights, layers), device, repeats)
    rival_name, rival = ("eager", eager) if cuda else ("compressed_tensors", compressed_tensors)
    rival_seconds = wall_seconds(lambda: rival(weights), device, repeats)
    different = codes_unlike_cpu(weights, requantise(weights, layers)) if cuda else 0

    figures = {
        "layers": len(layers),
        "weights": elements,
        "bytes_read_and_written": 3 * elements,
        "copy_gigabytes_per_s": bandwidth / 1e9,
        "cast_s": cast,
        "floor_s": floor,
        "requantise_s": ours,
        f"{rival_name}_s": rival_seconds,
        f"requantise_over_{rival_name}": ours / rival_seconds,
        "requantise_over_floor": ours / floor,
    }
    if cuda:
        goals = {
            "requantise_over_floor": (ours / floor, FLOOR_LIMIT),
            "codes_unlike_cpu": (different, 0),
        }
    else:
        goals = {f"requantise_over_{rival_name}": (ours / rival_seconds, 1.0)}
    report("requantise", device, figures, goals)


if __name__ == "__main__":
    main()
