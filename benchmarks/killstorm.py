"""Kills a real training run with SIGKILL, again and again, and compares what it ends in with an undisturbed run.

Every kill takes the trainer's process in the middle of a phase: rollout, reward, update, sync and validation after a
random share of the phase's time, metrics, checkpoint and publish at a random file operation of the phase, half of a
write done. Then the same command is started again, until the run finishes; its metrics.parquet must have the bytes of
the undisturbed one. A kill of a run that does not is lost. 50 kills, 5 with --quick.
"""

import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from _common import parse_args, report

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "workflow/scripts"
CONFIG = ["--configfile", "config/test.yaml"]
COMPUTING = ("rollout", "reward", "update", "sync", "validation")
WRITING = {  # phase: its file operations that a kill may hit; the last ones of publish are the final renames
    "metrics": ("write",),
    "checkpoint": ("open", "write", "fsync", "mkdir", "replace"),
    "publish": ("open", "write", "fsync", "replace"),
}
FINAL_RENAME = "publish: final rename"
MAX_KILLS_A_RUN = 8


@dataclass(frozen=True)
class Kill:
    """One planned kill: in the `occurrence`-th `phase` of the process, at share `moment` (0 … 1) of it."""

    phase: str
    occurrence: int
    moment: float


def main() -> None:
    arguments = parse_args(__doc__)
    wanted = 5 if arguments.quick else 50
    with tempfile.TemporaryDirectory(prefix="killstorm ") as folder:
        import score_centering.training.local  # noqa: F401  once here, so that each start is a fork of milliseconds

        prepare(Path(folder))
        reference, lengths = undisturbed()
        hits, survived, lost, runs = storm(wanted, reference, lengths)
    named = (*COMPUTING, *WRITING, FINAL_RENAME)
    for phase in named:
        print(f"killed in {phase:22} {hits[phase]:3}")
    print(f"survived {survived}, lost {lost}")
    never = sum(hits[phase] == 0 for phase in named)
    goals = {"lost": (lost, 0)} if arguments.quick else {"lost": (lost, 0), "phases_never_hit": (never, 0)}
    report(
        "killstorm",
        arguments.device,
        {
            "kills": survived + lost,
            "runs": runs,
            "phases_never_hit": never,
            "final_rename_kills": hits[FINAL_RENAME],
        },
        goals,
    )


def prepare(folder: Path) -> None:
    """In `folder`: a copy of the configuration, and a run's inputs, made by the pipeline's own programs."""
    shutil.copytree(ROOT / "config", folder / "config")
    os.chdir(folder)
    dataset, model = "results/test/dataset/manifest.json", "results/test/model/manifest.json"
    programs = {
        "dataset.py": ["--output-dir", "results/test/dataset"],
        "model.py": ["--dataset-manifest", dataset, "--output-dir", "results/test/model/base", "--manifest", model],
        "quantise.py": ["--model-manifest", model, "--output-dir", "results/test/model/w8a8"],
    }
    for program, options in programs.items():
        start([program, *options])


def storm(wanted: int, reference: bytes, lengths: dict[str, int | float]) -> tuple[Counter, int, int, int]:
    """Kills per phase, kills survived, kills lost, and finished runs."""
    source = random.Random(0)
    hits: Counter[str] = Counter()
    survived = lost = runs = 0
    phases = deal(source)
    while survived + lost < wanted:
        run_dir, kills = Path(f"run{runs}"), 0
        while kills < MAX_KILLS_A_RUN and survived + lost + kills < wanted:
            phase = next(phases)
            late = phase == "publish"  # its first operations only make temporary files
            kill = Kill(phase, 1 if late else source.randint(1, 2), source.uniform(0.4 * late, 1))
            if train(run_dir, lambda kill=kill: arm(kill, lengths)) == 0:
                break  # the run finished before the planned moment came
            died_in = where(run_dir)
            hits.update(died_in)
            kills += 1
            print(f"kill {survived + lost + kills:2}: {died_in[-1]}", file=sys.stderr, flush=True)
        if not (run_dir / "state/PUBLISHED").exists():
            train(run_dir)
        file = run_dir / "metrics.parquet"
        same = file.exists() and file.read_bytes() == reference
        survived, lost, runs = survived + kills * same, lost + kills * (not same), runs + 1
    return hits, survived, lost, runs


def deal(source: random.Random) -> Iterator[str]:
    """Phases in a random order, each once before any comes again; publish ends a run, so it comes last."""
    while True:
        deck = [*COMPUTING, "metrics", "checkpoint"]
        source.shuffle(deck)
        yield from [*deck, "publish"]


def where(run_dir: Path) -> list[str]:
    """The phase that a dead run was in, and whether it was among the final renames."""
    from score_centering.runs.folder import read_phase

    phase = read_phase(run_dir)
    name = phase.name if phase else "start"
    renaming = name == "publish" and any((run_dir / product).exists() for product in ("metrics.parquet", "run.json"))
    return [name, FINAL_RENAME] if renaming else [name]


def undisturbed() -> tuple[bytes, dict[str, int | float]]:
    """metrics.parquet of a run that nobody kills, with the seconds or file operations of each phase."""
    train(Path("reference"), measure)
    return Path("reference/metrics.parquet").read_bytes(), json.loads(Path("lengths.json").read_text())


def train(run_dir: Path, before: Callable[[], None] = lambda: None) -> int:
    return start(["train.py", "--baseline", "sc", "--run-dir", str(run_dir)], before)


def start(command: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Run one of the pipeline's programs in a child process that calls `before` first: 0, or -9 when it was killed."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            before()
            sys.argv = [*command, *CONFIG]
            runpy.run_path(str(PROGRAMS / command[0]), run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"error: {command[0]} ended with code {code}:\n{Path('log.txt').read_text()[-2000:]}")
    return code


def on_phase(call: Callable[[str], None]) -> None:
    """Call `call` with the name of every phase the run enters."""
    from score_centering.runs import RunFolder

    original = RunFolder.phase

    def phase(self: RunFolder, name: str) -> None:
        original(self, name)
        call(name)

    RunFolder.phase = phase  # type: ignore[method-assign]


def on_operation(names: tuple[str, ...], call: Callable[[], bool]) -> None:
    """Call `call` before each file operation of `names`; where it says so, the process dies with half a write done."""

    def wrapped(operation: Callable) -> Callable:
        def replaced(*arguments, **options):
            if call():
                if operation.__name__ == "write":
                    descriptor, content = arguments
                    operation(descriptor, content[: len(content) // 2])
                die()
            return operation(*arguments, **options)

        return replaced

    for name in names:
        setattr(os, name, wrapped(getattr(os, name)))


def measure() -> None:
    """In a child: leave the shortest seconds of the computing phases and the file operations of the writing ones."""
    times: dict[str, list[float]] = {}
    operations: Counter[str] = Counter()
    now = ["start", time.monotonic()]
    entered: Counter[str] = Counter()

    def enter(name: str) -> None:
        times.setdefault(now[0], []).append(time.monotonic() - now[1])
        now[:] = [name, time.monotonic()]
        entered[name] += 1

    def count() -> bool:
        if entered[now[0]] == 1:
            operations[now[0]] += 1
        return False

    on_phase(enter)
    on_operation(tuple({name for names in WRITING.values() for name in names}), count)
    original = os._exit

    def leave(code: int) -> None:
        shortest = {phase: min(spent) for phase, spent in times.items() if phase in COMPUTING}
        Path("lengths.json").write_text(json.dumps(shortest | {phase: operations[phase] for phase in WRITING}))
        original(code)

    os._exit = leave


def arm(kill: Kill, lengths: dict[str, int | float]) -> None:
    """In a child: prepare the planned kill."""
    entered = 0
    armed = [-1]

    def enter(name: str) -> None:
        nonlocal entered
        armed[0] = -1
        if name != kill.phase:
            return
        entered += 1
        if entered == kill.occurrence:
            if name in COMPUTING:
                timer = threading.Timer(kill.moment * lengths[name], die)
                timer.daemon = True
                timer.start()
            else:
                armed[0] = int(kill.moment * lengths[name])

    def operate() -> bool:
        armed[0] -= 1
        return armed[0] == -1

    on_phase(enter)
    if kill.phase in WRITING:
        on_operation(WRITING[kill.phase], operate)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
