"""Decoding vLLM's routes of 64 rollouts into one 128 MiB tensor: all payloads first, against one array at a time.

Each way runs in processes of its own, which hold the payloads (base64 text) before anything is measured. Temporary
bytes are Python's and NumPy's allocations by tracemalloc, in a process that is not timed; peak RSS counts from the
moment before decoding. Either device gives the same: this runs on the CPU. `--quick` only has fewer processes.
"""

import base64
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import torch
from _common import parse_args, report
from _routes import RoutedRow, decode_routes

from score_centering.runs import peak_rss_bytes

ROWS, PROMPT, RESPONSE, LAYERS, TOP_K, EXPERTS = 64, 1024, 7168, 32, 8, 128
TENSOR_BYTES = ROWS * (PROMPT + RESPONSE) * LAYERS * TOP_K


def write_payloads(folder: Path) -> int:
    """64 payloads of random routes and their lengths; returns the bytes of the largest array."""
    rng = np.random.default_rng(0)
    lengths = []
    with (folder / "payloads").open("wb") as file:
        for _ in range(ROWS):
            prompt, response = (
                int(rng.integers(PROMPT // 2, PROMPT + 1)),
                int(rng.integers(RESPONSE // 2, RESPONSE + 1)),
            )
            shape = (prompt + response - 1, LAYERS, TOP_K)
            buffer = io.BytesIO()
            np.save(buffer, rng.integers(0, EXPERTS, shape, dtype=np.uint8))
            lengths.append((prompt, response, file.write(base64.b64encode(buffer.getbuffer()))))
    (folder / "lengths.json").write_text(json.dumps(lengths))
    return max(prompt + response - 1 for prompt, response, _ in lengths) * LAYERS * TOP_K


def read_rows(folder: Path) -> list[RoutedRow]:
    with (folder / "payloads").open("rb") as file:
        return [
            RoutedRow(f"rollout {index}", file.read(size).decode("ascii"), prompt, response)
            for index, (prompt, response, size) in enumerate(json.loads((folder / "lengths.json").read_text()))
        ]


def one_at_a_time(rows: list[RoutedRow]) -> torch.Tensor:
    sizes = {"prompt_length": PROMPT, "response_length": RESPONSE, "layers": LAYERS, "top_k": TOP_K, "experts": EXPERTS}
    return decode_routes(rows, count=len(rows), **sizes)


def decode_all(rows: list[RoutedRow]) -> torch.Tensor:
    """What trainers do: every payload through np.load, then every copy."""
    arrays = [np.load(io.BytesIO(base64.b64decode(row.payload)), allow_pickle=False) for row in rows]
    routes = torch.zeros((len(rows), PROMPT + RESPONSE, LAYERS, TOP_K), dtype=torch.uint8)
    for place, row, array in zip(routes, rows, arrays, strict=True):
        start = PROMPT - row.prompt_tokens
        place[start : start + len(array)] = torch.from_numpy(array)
    return routes


WAYS = {"decode all": decode_all, "one at a time": one_at_a_time}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def child(way: str, folder: Path, what: str, repeats: int) -> None:
    """Prints one measurement as JSON: temporary bytes, or median seconds and peak RSS above the start."""
    torch.set_num_threads(1)
    rows, decode = read_rows(folder), WAYS[way]
    if what == "temporaries":
        tracemalloc.start()
        routes = decode(rows)
        print(json.dumps({"temporary": tracemalloc.get_traced_memory()[1], "digest": digest(routes)}))
        return
    before, seconds = resident_bytes(), []
    for _ in range(repeats):
        start = time.perf_counter()
        routes = decode(rows)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            peak = peak_rss_bytes() - before
        del routes
    print(json.dumps({"seconds": statistics.median(seconds), "peak": peak}))


def digest(routes: torch.Tensor) -> int:
    """A number that any change of a routes tensor changes."""
    return zlib.crc32(routes.numpy().data)


def run_child(way: str, folder: Path, what: str, repeats: int = 1) -> dict[str, float]:
    command = [sys.executable, __file__, "child", way, str(folder), what, str(repeats)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    processes, repeats = (1, 3) if parse_args(__doc__).quick else (5, 5)
    figures: dict[str, float] = {"tensor, MiB": TENSOR_BYTES / 2**20}
    with tempfile.TemporaryDirectory() as folder:
        array = write_payloads(Path(folder))
        figures["largest array, MiB"] = array / 2**20
        timed: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(processes):
            for way in WAYS:  # in turn, so that a disturbance meets both
                timed[way].append(run_child(way, Path(folder), "time", repeats))
        temporaries = {way: run_child(way, Path(folder), "temporaries") for way in WAYS}
    for way, runs in timed.items():
        figures[f"{way}: temporary MiB"] = temporaries[way]["temporary"] / 2**20
        figures[f"{way}: peak RSS, MiB"] = max(run["peak"] for run in runs) / 2**20
        figures[f"{way}: seconds"] = min(run["seconds"] for run in runs)
    ours = "one at a time"
    goals = {
        "temporaries in arrays": (temporaries[ours]["temporary"] / array, 1.01),
        "peak RSS in (tensor + one array)": (
            max(run["peak"] for run in timed[ours]) / (TENSOR_BYTES + array),
            1.10,
        ),
        "seconds against decode all": (figures[f"{ours}: seconds"] / figures["decode all: seconds"], 1.0),
        "results that differ": (float(len({run["digest"] for run in temporaries.values()}) - 1), 0.0),
    }
    report("routing", "cpu", figures, goals)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main()
