"""Processor seconds before a program's work, beside those of `import torch`.

`…_cpu_s` is user and system time of one process and its children, the median of interleaved rounds: a busy machine
changes it least. Programs are started with `--help`, which ends after the imports that every call makes; the modules of
training are imported as `train.py` does once its settings are good.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from _common import parse_args, report

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "workflow/scripts"
COMMANDS = {
    "torch": ["-c", "import torch"],
    "dry_run": ["-m", "snakemake", "--dry-run", "--quiet", "all", "--", "all"],
    "gate": [str(SCRIPTS / "gate.py"), "--help"],
    "figures": [str(SCRIPTS / "figures.py"), "--help"],
    "training": ["-c", "import score_centering.training.local"],
}
# 2.5 s where torch takes 1.5.
LIMIT = 2.5 / 1.5


def cpu_seconds(command: list[str]) -> float:
    """User and system time of `python COMMAND` at the project's root, its children included."""
    before = os.times()
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).check_returncode()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    arguments = parse_args(__doc__)
    rounds = 1 if arguments.quick else 5
    taken = [{name: cpu_seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    seconds = {name: statistics.median(each[name] for each in taken) for name in COMMANDS}
    goals = {
        f"{name}_over_torch": (statistics.median(each[name] / each["torch"] for each in taken), LIMIT)
        for name in COMMANDS
        if name != "torch"
    }
    report("startup", "cpu", {f"{name}_cpu_s": value for name, value in seconds.items()}, goals)


if __name__ == "__main__":
    main()
