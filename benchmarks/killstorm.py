"""Kills a real training run with SIGKILL, again and again, and compares what it ends in with an undisturbed run.

Every kill takes the trainer's process in the middle of a phase: rollout, reward, update, sync and validation after a
random share of the phase's time, metrics, checkpoint and publish at a random file operation of the phase, half of a
write done. Then the same command is started again, until the run finishes; its metrics.parquet must have the bytes of
the undisturbed one. A kill of a run that does not is lost.

Half of the kills take other starts, in a folder that holds a finished run, and compare every published file: a start by
hand with other settings; a start by hand of the same run anew; a forced rerun, whose files the workflow has deleted,
finished, or given up and restored; another rate in its place and back; a run of a study. 200 kills, 8 with --quick.
"""

import hashlib
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
MOVING = ("open", "write", "fsync", "mkdir", "replace", "rmdir", "unlink")  # before the first phase: states move
MOST_MOVES = 60
OTHER_RATE = "actor_rollout_ref.actor.optim.lr=1.0e-5"
MAX_KILLS_A_RUN = 8


@dataclass(frozen=True)
class Kill:
    """One planned kill: in the `occurrence`-th `phase` of the process, at share `moment` (0 … 1) of it."""

    phase: str
    occurrence: int
    moment: float


def main() -> None:
    arguments = parse_args(__doc__)
    wanted = 3 if arguments.quick else 100
    wanted_scenes = 5 if arguments.quick else 100
    with tempfile.TemporaryDirectory(prefix="killstorm ") as folder:
        import score_centering.training.local  # noqa: F401  once here, so that each start is a fork of milliseconds

        prepare(Path(folder))
        reference, lengths = undisturbed()
        hits, survived, lost, runs = storm(wanted, reference, lengths)
        in_scenes, whole = Scenes(lengths).play(wanted_scenes)
    named = (*COMPUTING, *WRITING, FINAL_RENAME)
    for phase in named:
        print(f"killed in {phase:22} {hits[phase]:3}")
    for scene, kills in in_scenes.items():
        print(f"killed in {scene:22} {kills:3}, every published file as it was after {whole[scene]:3}")
    scene_kills = sum(in_scenes.values())
    survived, lost = survived + sum(whole.values()), lost + scene_kills - sum(whole.values())
    print(f"survived {survived}, lost {lost}")
    never = sum(hits[phase] == 0 for phase in named)
    goals = {"lost": (lost, 0)} if arguments.quick else {"lost": (lost, 0), "phases_never_hit": (never, 0)}
    report(
        "killstorm",
        arguments.device,
        {
            "kills": survived + lost,
            "runs": runs,
            **{f"kills: {scene}": kills for scene, kills in in_scenes.items()},
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


class Scenes:
    """Starts around a finished run, each killed once on its way.

    A scene begins with a copy of the finished run, is killed at a random moment of one start, goes on as a user would,
    and returns whether every published file is as it was.
    """

    def __init__(self, lengths: dict[str, int | float]) -> None:
        self.lengths, self.source, self.count = lengths, random.Random(1), 0
        self.finished = Path("reference")
        self.study = ["train.py", "--baseline", "sc", "--settings", study_settings()]
        start([*self.study, "--run-dir", "study"])

    def play(self, wanted: int) -> tuple[Counter, Counter]:
        """Kills, and those after which nothing was lost, by scene."""
        scenes = {
            "by hand, other settings": self.by_hand,
            "by hand, anew": self.anew,
            "forced rerun, finished": self.forced,
            "forced rerun, restored": self.restored,
            "another rate and back": self.back,
            "study": self.study_run,
        }
        kills: Counter[str] = Counter(dict.fromkeys(scenes, 0))
        whole: Counter[str] = Counter(dict.fromkeys(scenes, 0))
        names = list(scenes)
        while kills.total() < wanted:
            name = names[self.count % len(names)]
            run_dir = Path(f"scene{self.count}")
            self.count += 1
            killed, kept = scenes[name](run_dir)
            kills[name] += killed
            whole[name] += killed and kept
            print(f"scene {self.count:3}: {name}: {'killed' if killed else 'not hit'}", file=sys.stderr, flush=True)
            if not killed and not kept:
                raise SystemExit(f"error: {name}: files were lost without a kill; see {run_dir.resolve()}")
            shutil.rmtree(run_dir)
        return kills, whole

    def by_hand(self, run_dir: Path) -> tuple[bool, bool]:
        """It is refused, so the kill comes while it looks."""
        shutil.copytree(self.finished, run_dir)
        killed = self._killed(["--run-dir", str(run_dir), OTHER_RATE], moving=True)
        return killed, published(run_dir) == published(self.finished)

    def anew(self, run_dir: Path) -> tuple[bool, bool]:
        """The files are there all the while; a part of them may be those of the new run, which are the same."""
        shutil.copytree(self.finished, run_dir)
        killed = self._killed(["--run-dir", str(run_dir), "--afresh"])
        kept = lasting(run_dir) == lasting(self.finished)
        train(run_dir)
        return killed, kept and lasting(run_dir) == lasting(self.finished) and consistent(run_dir)

    def forced(self, run_dir: Path) -> tuple[bool, bool]:
        self._deleted(run_dir)
        killed = self._killed(["--run-dir", str(run_dir), "--afresh"])
        train(run_dir)
        return killed, lasting(run_dir) == lasting(self.finished) and consistent(run_dir)

    def restored(self, run_dir: Path) -> tuple[bool, bool]:
        self._deleted(run_dir)
        killed = self._killed(["--run-dir", str(run_dir), "--afresh"])
        start(["restore.py", str(run_dir)])
        anew = (run_dir / "state/archive").is_dir() and consistent(run_dir)  # it had finished, or it was put back
        return killed, published(run_dir) == published(self.finished) or (
            anew and lasting(run_dir) == lasting(self.finished)
        )

    def back(self, run_dir: Path) -> tuple[bool, bool]:
        self._deleted(run_dir)
        killed = self._killed(["--run-dir", str(run_dir), OTHER_RATE])
        for path in declared(run_dir):  # what Snakemake does ahead of the job that goes back
            path.unlink()
        train(run_dir)
        return killed, published(run_dir) == published(self.finished)

    def study_run(self, run_dir: Path) -> tuple[bool, bool]:
        command = [*self.study, "--run-dir", str(run_dir)]
        killed = start(command, lambda: arm(self._kill(False), self.lengths)) != 0
        start(command)
        return killed, lasting(run_dir) == lasting(Path("study")) and consistent(run_dir)

    def _deleted(self, run_dir: Path) -> None:
        shutil.copytree(self.finished, run_dir)
        for path in declared(run_dir):
            path.unlink()

    def _killed(self, options: list[str], moving: bool = False) -> bool:
        command = ["train.py", "--baseline", "sc", *options]
        return start(command, lambda: arm(self._kill(moving), self.lengths), allowed=(0, 2)) == -signal.SIGKILL

    def _kill(self, moving: bool) -> Kill:
        phase = "moving" if moving else self.source.choice(["moving", *COMPUTING, *WRITING])
        share = 0.05 if moving else 1.0  # a refusal makes few file operations
        return Kill(phase, 1, self.source.uniform(0.4 * (phase == "publish"), share))


def study_settings() -> str:
    """Settings of a study's run: those of the arm, under noise on the engine's weights."""
    from score_centering.settings import load_settings
    from score_centering.settings.stages import TrainStage
    from score_centering.settings.study_blocks import Perturbation

    settings = load_settings(["config/config.yaml", CONFIG[1]], arm="sc")
    return TrainStage.of(settings, Perturbation(weight_noise=0.05)).to_json()


def declared(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.iterdir() if path.is_file()]


def published(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in declared(run_dir) if not path.name.startswith(".")}


def lasting(run_dir: Path) -> dict[str, bytes]:
    """The published files that hold no time, which every run of one identity gives the same bytes."""
    return {name: content for name, content in published(run_dir).items() if name != "timing.parquet"}


def consistent(run_dir: Path) -> bool:
    """Whether the published files are those that the finished state says it published."""
    digests = json.loads((run_dir / "state/PUBLISHED").read_text())
    return digests == {name: hashlib.sha256(content).hexdigest() for name, content in published(run_dir).items()}


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


def start(command: list[str], before: Callable[[], None] = lambda: None, allowed: tuple[int, ...] = (0,)) -> int:
    """Run one of the pipeline's programs in a child process that calls `before` first: one of `allowed`, or -9 when it
    was killed."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            before()
            sys.argv = [*command, *([] if "--settings" in command or command[0] == "restore.py" else CONFIG)]
            runpy.run_path(str(PROGRAMS / command[0]), run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (*allowed, -signal.SIGKILL):
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
    if kill.phase == "moving":
        armed[0] = int(kill.moment * MOST_MOVES)
        on_operation(MOVING, operate)
    if kill.phase in WRITING:
        on_operation(WRITING[kill.phase], operate)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
