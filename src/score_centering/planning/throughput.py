"""Figures that a run's hours are estimated from: each with its source, measured or assumed."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Where models and engines run.

    memory_bytes: as the driver reports it.  bandwidth: bytes a second.  flops: dense BF16 operations a second.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    source: str


MIB = 1 << 20
DEVICES = {
    "b200": Device("B200 192 GB", 183_359 * MIB, 8.0e12, 2.25e15, "data sheet; memory as nvidia-smi shows it"),
    "h200": Device("H200 141 GB", 143_771 * MIB, 4.3e12, 790e12, "measured: nvidia-smi, a copy, an 8192³ product"),
    "h100": Device("H100 80 GB", 81_559 * MIB, 3.35e12, 989e12, "data sheet; memory as nvidia-smi shows it"),
}
H200 = DEVICES["h200"]


@dataclass(frozen=True)
class Decoding:
    """Measured decoding: tokens a second of W8A8 weights and an INT4 KV cache with K captured candidates."""

    engine: str  # vllm or local
    device: str  # key of DEVICES, or cpu
    parameters: float
    batch: int
    candidates: int
    tokens_per_s: float
    source: str


_VLLM = "measured: vLLM 0.25.0 on one H200, CUDA graphs"
DECODING = [
    Decoding("vllm", "h200", 8.95e9, 64, 0, 5_659, f"{_VLLM}, 9 B shape, dummy weights"),
    Decoding("vllm", "h200", 8.95e9, 256, 0, 11_503, f"{_VLLM}, 9 B shape, dummy weights"),
    Decoding("vllm", "h200", 8.95e9, 64, 128, 5_284, f"{_VLLM}, 9 B shape, dummy weights"),
    Decoding("vllm", "h200", 8.95e9, 256, 128, 9_830, f"{_VLLM}, 9 B shape, dummy weights"),
    Decoding("vllm", "h200", 1.35e8, 64, 0, 16_310, f"{_VLLM}, SmolLM2-135M"),
    Decoding("vllm", "h200", 1.35e8, 256, 0, 45_228, f"{_VLLM}, SmolLM2-135M"),
    Decoding("vllm", "h200", 1.35e8, 64, 128, 13_626, f"{_VLLM}, SmolLM2-135M"),
    Decoding("vllm", "h200", 1.35e8, 256, 128, 20_291, f"{_VLLM}, SmolLM2-135M"),
    Decoding("local", "h200", 1.35e8, 64, 0, 16_579, "measured: benchmarks/engine.py on one H200, SmolLM2-135M"),
    Decoding("local", "h200", 1.35e8, 64, 128, 14_882, "measured: benchmarks/engine.py on one H200, SmolLM2-135M"),
    Decoding("local", "h200", 4.0e5, 128, 0, 123_000, "measured: the tiny model on one H200, docs/results/tiny-cuda"),
    Decoding("local", "h200", 4.0e5, 128, 2, 100_000, "measured: the tiny model on one H200, docs/results/tiny-cuda"),
    Decoding("local", "cpu", 4.0e5, 128, 0, 8_000, "measured: the default run on two cores, 5,600 to 8,000"),
    Decoding("local", "cpu", 4.0e5, 128, 2, 7_000, "measured: the default run on two cores, 5,600 to 8,000"),
]
BF16_SLOWDOWN = 1.19  # measured: benchmarks/engine.py on one H200, SmolLM2-135M, BF16 against W8A8 + INT4 KV
TRAINER_UTILISATION = 0.35  # assumed share of a GPU's BF16 operations that training reaches
CPU_TRAINER_FLOPS = 3.2e10  # measured: 6 · parameters · padded tokens / update_s of the default run on two cores


def decoding_seconds(
    engine: str, device: str, parameters: float, batch: int, candidates: int, bf16: bool
) -> tuple[float, str]:
    """Seconds of one decoding step of `batch` sequences, and where the figure comes from.

    Taken from the measurement that is nearest in parameters, then batch, then K. A step's time is interpolated between
    two measured batch sizes; another size of model scales it by the parameters, another GPU by its bandwidth.
    """
    where = "cpu" if device == "cpu" else "h200"
    rows = [row for row in DECODING if row.engine == engine and row.device == where]
    rows = rows or [row for row in DECODING if row.device == where]
    size = min((row.parameters for row in rows), key=lambda p: abs(math.log(p / parameters)))
    rows = [row for row in rows if row.parameters == size]
    k = min((row.candidates for row in rows), key=lambda k: abs(k - candidates))
    rows = sorted((row for row in rows if row.candidates == k), key=lambda row: row.batch)
    times = [row.batch / row.tokens_per_s for row in rows]
    seconds, notes = times[0], [rows[0].source]
    if len(rows) > 1:
        slope = (times[1] - times[0]) / (rows[1].batch - rows[0].batch)
        seconds = max(times[0] / 2, times[0] + slope * (batch - rows[0].batch))
    if not 0.5 < parameters / size < 2:
        seconds *= parameters / size
        notes.append(f"assumed: scaled by parameters from {size:.3g}")
    if device not in ("cpu", "h200"):
        seconds *= H200.bandwidth / DEVICES[device].bandwidth
        notes.append("assumed: scaled by memory bandwidth")
    if bf16:
        seconds *= BF16_SLOWDOWN
        notes.append(f"BF16 × {BF16_SLOWDOWN}, measured with SmolLM2-135M")
    return seconds, "; ".join(notes)


def training_flops_per_second(device: str) -> tuple[float, str]:
    """Operations a second that the trainer reaches, and where the figure comes from."""
    if device == "cpu":
        return CPU_TRAINER_FLOPS, "measured: update_s of the default run on two cores"
    found = DEVICES[device]
    return found.flops * TRAINER_UTILISATION, f"assumed: {TRAINER_UTILISATION:.0%} of {found.flops / 1e12:.0f} TFLOP/s"
