"""What the benchmarks share: their options, timing, and the report whose last line is one JSON object.

A goal is (value, limit): met when value ≤ limit; or (value, limit, "at least"). Ratios and bytes are goals, absolute
times are figures.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # what tests and benchmarks share

PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "compressed-tensors", "liger-kernel", "flash-linear-attention"),
    *("vllm", "verl"),
)

Goal = tuple[float, float] | tuple[float, float, str]


def parse_args(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """`quick` (bool) and `device` ("cpu" or "cuda"; CUDA where there is one)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under 40 s on two CPU cores")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    return arguments


def median_seconds(function: Callable[[], object], device: str, repeats: int, warm_ups: int = 2) -> float:
    """Median time of `function` in seconds: CUDA events on a GPU, the wall clock on the CPU."""
    for _ in range(warm_ups):
        function()
    return statistics.median(_seconds(function, device) for _ in range(repeats))


def _seconds(function: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def versions(device: str) -> dict[str, str]:
    """Python, the machine, and each of PACKAGES that is installed."""
    found = {"python": platform.python_version()}
    found["machine"] = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report(benchmark: str, device: str, figures: dict[str, float], goals: dict[str, Goal]) -> None:
    """Print the figures and goals as a table, then everything as one line of JSON."""
    judged = {name: _judge(*goal) for name, goal in goals.items()}
    width = max((len(name) for name in (*figures, *judged)), default=0)
    for name, value in figures.items():
        print(f"{name:{width}}  {value:>14.6g}")
    for name, goal in judged.items():
        print(f"{name:{width}}  {goal['value']:>14.6g}  goal {goal['limit']:.6g}: {'met' if goal['met'] else 'MISSED'}")
    print(
        json.dumps(
            {
                "benchmark": benchmark,
                "device": device,
                "versions": versions(device),
                "figures": figures,
                "goals": judged,
            }
        ),
        flush=True,
    )


def _judge(value: float, limit: float, sense: str = "at most") -> dict[str, float | bool]:
    met = value >= limit if sense == "at least" else value <= limit
    return {"value": value, "limit": limit, "met": met}
