"""Requantising after an update, at the linear-layer shapes of a 9 B Qwen3.5, against the bytes it must move.

The floor of a format is reading every BF16 weight and writing every stored byte once, at the bandwidth of a device copy
measured in the same run; where a scale belongs to a whole matrix (NVFP4), reading every weight twice. INT8's is the
faster of that and an elementwise cast of the same tensors. On a CPU the rival of INT8 is compressed-tensors' own
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
from score_centering.precision.format import Format
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.registry import FORMATS, format_of

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


def bytes_moved(used: Format, weights: dict[str, Tensor]) -> int:
    """Bytes that requantising has to read and write: a scale of a whole matrix is known after one reading only."""
    read = sum(weight.nbytes for weight in weights.values()) * (2 if used.whole_scale else 1)
    kinds = [used.stored(weight.shape[0], weight.shape[1]).values() for weight in weights.values()]
    return read + sum(kind.nbytes for each in kinds for kind in each)


def bytes_unlike_cpu(used: Format, weights: dict[str, Tensor]) -> int:
    """Stored bytes that differ from the CPU path's, on one layer of each shape."""
    layers = {weight.shape: name.removesuffix(".weight") for name, weight in weights.items()}.values()
    chosen = {f"{layer}.weight": weights[f"{layer}.weight"] for layer in layers}
    listed = dict.fromkeys(layers, used)
    ours = requantise(chosen, listed)
    expected = requantise({name: weight.cpu() for name, weight in chosen.items()}, listed)
    return sum(
        int((ours[name].cpu().view(torch.uint8) != tensor.view(torch.uint8)).sum()) for name, tensor in expected.items()
    )


def main() -> None:
    arguments = parse_args(__doc__)
    device, cuda = arguments.device, arguments.device == "cuda"
    config = Qwen3_5TextConfig()
    if arguments.quick:
        config = Qwen3_5TextConfig(
            num_hidden_layers=4, **({} if cuda else {"hidden_size": 512, "intermediate_size": 1536})
        )
    weights = random_weights(linear_shapes(config), device)
    layers = [name.removesuffix(".weight") for name in weights]
    elements = sum(weight.numel() for weight in weights.values())
    repeats = 3 if arguments.quick else 20

    cast = cast_seconds(weights, device, repeats)
    bandwidth = copy_bandwidth(elements, device, repeats)
    rival_name, rival = ("eager", eager) if cuda else ("compressed_tensors", compressed_tensors)
    rival_seconds = wall_seconds(lambda: rival(weights), device, repeats)
    figures = {
        "layers": len(layers),
        "weights": elements,
        "copy_gigabytes_per_s": bandwidth / 1e9,
        "cast_s": cast,
        f"int8_{rival_name}_s": rival_seconds,
    }
    goals = {}
    for name in FORMATS:
        used = format_of(name)
        listed = dict.fromkeys(layers, used)
        moved = bytes_moved(used, weights)
        floor = moved / bandwidth if used is not INT8 else min(cast, moved / bandwidth)
        seconds = wall_seconds(lambda listed=listed: requantise(weights, listed), device, repeats)
        figures |= {
            f"{name}_bytes_read_and_written": moved,
            f"{name}_floor_s": floor,
            f"{name}_requantise_s": seconds,
            f"{name}_requantise_over_floor": seconds / floor,
        }
        if cuda:
            goals[f"{name}_requantise_over_floor"] = (seconds / floor, FLOOR_LIMIT)
            goals[f"{name}_bytes_unlike_cpu"] = (bytes_unlike_cpu(used, weights), 0)
        elif used is INT8:
            goals[f"int8_requantise_over_{rival_name}"] = (seconds / rival_seconds, 1.0)
    report("requantise", device, figures, goals)


if __name__ == "__main__":
    main()
