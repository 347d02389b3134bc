"""Preparing 300,000 rows of INTELLECT-style data (30,000 with --quick): time, memory, and what the answer check costs.

Runs the stage's program on a generated parquet file, once with the file's rows in order and once shuffled, and compares
the outputs. Processor seconds count all processes: on two free cores the clock shows less. Then checks a sample of gold
answers with the recogniser of plain math and with the parser alone.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from _common import parse_args, report
from reward import SHARES, answer

from score_centering.reward import Scorer, scorer

PROGRAM = Path(__file__).parents[1] / "workflow/scripts/dataset.py"
START_ROWS = 1000  # their preparation is nearly all start-up, which does not grow with the rows
WORDS = ("sum", "of", "all", "positive", "integers", "such", "that", "triangle", "has", "side", "find", "how", "many")


def rows(count: int, seed: int) -> list[dict]:
    """Prompts of about 400 characters; 2 % duplicates, 2 % without an answer."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        if index and rng.random() < 0.02:
            made.append(made[rng.randrange(index)])
            continue
        text = " ".join(rng.choices(WORDS, k=70))
        [kind] = rng.choices(list(SHARES), list(SHARES.values()))
        truth = answer(kind, rng) if rng.random() > 0.02 else rng.choice(["", None])
        info = json.dumps({"ground_truth": truth})
        made.append({"prompt": f"{index}: {text}?", "verification_info": info, "solve_rate": rng.random()})
    return made


def prepare(file: Path, output: Path) -> tuple[float, float, int]:
    """(seconds by the clock, processor seconds of all processes, their peak bytes together) of one preparation."""
    settings = {"dataset": {"source": "local", "local": {"path": str(file)}, "val_size": 500}}
    command = [sys.executable, str(PROGRAM), "--settings", json.dumps(settings), "--output-dir", str(output)]
    start, cpu_start, peak = time.perf_counter(), child_cpu_seconds(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"the dataset program ended with {process.returncode}")
    return time.perf_counter() - start, child_cpu_seconds() - cpu_start, peak


def child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children; shared pages count once for each."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def check_rate(answers: list[str]) -> float:
    with Scorer(workers=2) as checker:
        checker.are_golds([r"x+\sqrt{7}", r"y+\sqrt{7}"])
        start = time.perf_counter()
        checker.are_golds(answers)
        return len(answers) / (time.perf_counter() - start)


def main() -> None:
    arguments = parse_args(__doc__)
    count = 30_000 if arguments.quick else 300_000
    made = rows(count, seed=1)
    figures = {"rows": count}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        seconds, cpu, peaks, outputs = [], [], [], []
        for run in range(2):
            file = base / f"in-{run}" / "rows.parquet"
            file.parent.mkdir()
            pq.write_table(pa.Table.from_pylist(made), file)
            taken, cpu_taken, peak = prepare(file, base / str(run))
            seconds.append(taken)
            cpu.append(cpu_taken)
            peaks.append(peak)
            outputs.append([(base / str(run) / name).read_bytes() for name in ("train.parquet", "test.parquet")])
            random.Random(run).shuffle(made)
        figures["output_bytes"] = sum(map(len, outputs[0]))
        pq.write_table(pa.Table.from_pylist(made[:START_ROWS]), file)
        _, start_cpu, _ = prepare(file, base / "start")
    figures["seconds"], figures["cpu_seconds"], figures["cpu_seconds_of_1000_rows"] = min(seconds), min(cpu), start_cpu
    full_cpu = start_cpu + (min(cpu) - start_cpu) * (300_000 - START_ROWS) / (count - START_ROWS)
    sample = sorted({json.loads(row["verification_info"])["ground_truth"] or "1" for row in made[:3000]})
    figures["gold_checks_per_s"] = check_rate(sample)
    recogniser, scorer.is_plain_math = scorer.is_plain_math, lambda text: False
    figures["gold_checks_per_s_parser_alone"] = check_rate(sample[:: 10 if arguments.quick else 2])
    scorer.is_plain_math = recogniser
    ratio = figures["gold_checks_per_s"] / figures["gold_checks_per_s_parser_alone"]
    goals = {
        "peak_bytes": (float(max(peaks)), 2e9),
        "cpu_seconds_for_300000_rows": (full_cpu, 60.0),
        "gold_check_speed_up_of_the_recogniser": (ratio, 2.0, "at least"),
        "shuffled_rows_change_the_files": (float(outputs[0] != outputs[1]), 0.0),
    }
    report("dataset", "cpu", figures, goals)


if __name__ == "__main__":
    main()
