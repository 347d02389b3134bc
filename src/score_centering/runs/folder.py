"""A run folder: who owns it, where it resumes, and how its results are declared.

<run_dir>/metrics.parquet timing.parquet config.yaml run.json    declared: renamed into place at the very end
<run_dir>/state/
    lock          flock; names pid and host while a process holds it
    identity.json what the state was made from
    steps.log     append-only metrics log (`log.py`)
    checkpoints/  the last two good ones (`checkpoint.py`)
    damaged/      checkpoints that failed their digests
    phase         what the run is doing, for `watch` and for kill tests
    published/    copies of the declared files, written before them
    PUBLISHED     digests of the declared files, written after them
    archive/<n>/  other states of this folder (`archive.py`)
"""

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from score_centering.runs import archive, checkpoint, schema
from score_centering.runs.files import make_folder, write_file, write_files, writing
from score_centering.runs.identity import differences, read_identity
from score_centering.runs.lock import hold
from score_centering.runs.log import MetricsLog, encode, read_log, to_row, to_table
from score_centering.runs.process import EXIT_RESUMABLE, StopFlag, stop_on_signals
from score_centering.runs.provenance import provenance
from score_centering.settings import UserError

if TYPE_CHECKING:
    from torch import Tensor

PRODUCTS = ("metrics.parquet", "timing.parquet", "config.yaml", "run.json")
FOLDERS = ("checkpoints", "damaged", archive.COPIES, archive.ARCHIVE)  # of the state
PHASES = ("start", "rollout", "reward", "update", "sync", "validation", "metrics", "checkpoint", "publish")
PHASE_BYTES = 64


@contextmanager
def open_run(
    run_dir: str | Path, identity: Mapping[str, Any], publish: Sequence[str] = PRODUCTS, afresh: bool = False
) -> Iterator["RunFolder"]:
    """Own `run_dir` for the block: lock it, check its identity, set other states aside, catch stop signals.

    `identity` comes from `make_identity`; `publish` names the files that `RunFolder.publish` declares. A finished state
    is set aside, and so, with `afresh`, is an unfinished one of another identity. A block that fails before its first
    step leaves a finished run as it found it.

    Raises:
        UserError: another process owns the folder, it can't be written, or it holds what must stay: declared files of
            another identity, or an unfinished state of one.
    """
    unknown = sorted(set(publish) - set(PRODUCTS))
    if unknown or not publish:
        raise ValueError(f"publish = {list(publish)}: choose from {', '.join(PRODUCTS)}")
    run_dir = Path(run_dir)
    state = run_dir / "state"
    with _owned(run_dir), stop_on_signals() as stop:
        _refuse_to_overwrite(run_dir, identity)
        finished = _make_room(state, identity, afresh)
        run = None
        try:
            run = RunFolder(run_dir, _check_identity(state, identity), tuple(publish), stop)
            yield run
        except BaseException:
            if finished is not None and (run is None or not run.records()):
                archive.drop(state)
                archive.bring_back(state, finished)
                _say(f"{run_dir}: did not start; its finished run is kept")
            raise
        finally:
            if run is not None:
                run.close()


def finished_again(run_dir: str | Path, identity: Mapping[str, Any]) -> bool:
    """Declare the finished run of `identity` that `run_dir` holds, or that its archive holds, instead of training.

    Returns whether there is one; its files are those that it published, whoever deleted or changed them since.
    """
    run_dir = Path(run_dir)
    state = run_dir / "state"
    if not state.is_dir():
        return False
    with _owned(run_dir):
        _refuse_to_overwrite(run_dir, identity)
        if not (_is_finished(state) and archive.is_of(state, identity)):
            other = archive.newest(state, identity, finished=True)
            if other is None or archive.is_of(state, identity) or archive.copies(other) is None:
                return False
            if (state / "identity.json").exists():
                _say(f"{run_dir}: the state of another identity is kept in {archive.set_aside(state)}")
            archive.bring_back(state, other)
        kept = archive.copies(state)
        if kept is None:
            return False
        changed = archive.declare(run_dir, kept)
        _say(f"{run_dir}: is finished; {', '.join(changed) or 'nothing'} put back (--afresh trains it anew)")
        return True


def restore(run_dir: str | Path, number: int | None = None) -> str:
    """Bring a finished run back: that of archive/<number>, else the present one, else the newest archived one.

    The present state is set aside, the declared files are those of the run that comes back. Returns what was done.

    Raises:
        UserError: there is none, its copies of the declared files are gone or damaged, a process owns the folder.
    """
    run_dir = Path(run_dir)
    state = run_dir / "state"
    if not state.is_dir():
        raise UserError(f"{run_dir}: holds no state of a run; give a run folder, such as results/tiny/runs/sc/seed0")
    with _owned(run_dir):
        source: Path | None = state / archive.ARCHIVE / f"{number:04d}" if number is not None else state
        if number is None and not _is_finished(state):
            source = archive.newest(state, finished=True)
        if source is None or not _is_finished(source):
            raise UserError(f"{source or state / archive.ARCHIVE}: holds no finished run")
        if archive.copies(source) is None:
            raise UserError(f"{source}: its copies of the declared files are missing or damaged")
        if source != state:
            if (state / "identity.json").exists():
                archive.set_aside(state)
            archive.bring_back(state, source)
        kept = archive.copies(state)
        assert kept is not None
        changed = archive.declare(run_dir, kept)
    return f"{run_dir}: restored from {source}: {', '.join(changed) or 'every declared file was there'}"


class RunFolder:
    """An owned run folder. Call `resume` once, then for each step `record_step` and, when due, `save_checkpoint`;
    at the end `publish`. Made by `open_run` only.
    """

    def __init__(self, run_dir: Path, identity: Mapping[str, Any], publish: tuple[str, ...], stop: StopFlag) -> None:
        self.path = run_dir
        self.state = run_dir / "state"
        self.identity = dict(identity)
        self._publish = publish
        self._stop = stop
        self._log = MetricsLog(self.state / "steps.log")
        with writing(self.state / "phase"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            self._phase = os.open(self.state / "phase", flags, 0o666)
        self._phases = 0
        self._last_step: int | None = None
        self._resumed = False
        self.phase("start")

    def resume(self) -> tuple[int, dict[str, "Tensor"], dict[str, Any]] | None:
        """Step, tensors and scalars of the last good checkpoint; None when training starts at the beginning.

        Log entries after that checkpoint are dropped (the steps are made again). A damaged checkpoint, or one whose
        log was changed, is set aside with one line on stderr.
        """
        self._resumed = True
        found = checkpoint.paths(self.state / "checkpoints")
        for path in found:
            try:
                good = checkpoint.read(path)
                if self._log.prefix_sha256(good.log_bytes) != good.log_sha256:
                    raise checkpoint.DamagedError("the metrics log it belongs to was changed")
            except checkpoint.DamagedError as error:
                moved = checkpoint.set_aside(path, self.state / "damaged")
                _say(f"{path}: not resumed from: {error}; moved to {moved}")
                continue
            self._log.truncate(good.log_bytes)
            records = self.records()
            self._last_step = records[-1]["step"] if records else None
            _say(f"{self.path}: resuming after step {good.step}")
            return good.step, good.tensors, good.scalars
        if found:
            _say(f"{self.path}: no checkpoint is usable; training starts at the beginning")
        self._log.truncate(0)
        return None

    def record_step(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Append one step to the log: the only way a metric is written.

        Columns that are not given are null (not measured at this step). `started_at` is a datetime with its zone.

        Raises:
            UserError: an unknown column, a value that is not finite or of another type; nothing is written then.
        """
        if not self._resumed:
            raise RuntimeError("call resume() before record_step()")
        if self._last_step is not None and step != self._last_step + 1:
            raise ValueError(f"step {step} does not follow step {self._last_step}")
        line = encode(step, to_row(metrics, schema.METRICS, step), to_row(timing, schema.TIMING, step))
        self.phase("metrics")
        self._log.append(line)
        self._last_step = step

    def save_checkpoint(self, step: int, tensors: Mapping[str, "Tensor"], scalars: Mapping[str, Any]) -> None:
        """Write the state after `step`, which must be the last one recorded; nothing to do when it exists.

        `tensors` and JSON `scalars` must hold everything that shapes the next step: masters, optimiser, scheduler,
        every random generator, data position. Tensors must not share memory.
        """
        if self._last_step is not None and step != self._last_step:
            raise ValueError(f"checkpoint of step {step}, but step {self._last_step} was recorded last")
        folder = self.state / "checkpoints"
        if any(path.name == f"step{step:06d}" for path in checkpoint.paths(folder)):
            return
        self.phase("checkpoint")
        self._log.sync()
        size = self._log.size()
        digest = self._log.prefix_sha256(size)
        assert digest is not None
        checkpoint.write(folder, checkpoint.Checkpoint(step, dict(tensors), dict(scalars), size, digest))

    def records(self) -> list[dict[str, Any]]:
        """Everything recorded so far: `{"step", "metrics", "timing"}` a step."""
        return read_log(self._log.path)

    def publish(self, config_yaml: str, run_info: Mapping[str, Any]) -> None:
        """Declare the results: temporary names first, then the renames, then `state/PUBLISHED`.

        `run_info` is added to run.json beside identity and provenance and must hold no wall-clock value.
        """
        self.phase("publish")
        records = self.records()
        if not records:
            raise ValueError("nothing was recorded, so there is nothing to publish")
        metadata = {key: str(self.identity[key]) for key in ("experiment", "arm", "seed")}
        made = {"identity": self.identity, "provenance": provenance()}
        run_json = {"schema_version": schema.SCHEMA_VERSION, **made, **run_info}
        contents = {
            "metrics.parquet": schema.table_bytes(to_table(records, "metrics", schema.METRICS), metadata),
            "timing.parquet": schema.table_bytes(to_table(records, "timing", schema.TIMING), metadata),
            "config.yaml": config_yaml.encode(),
            "run.json": (json.dumps(run_json, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(),
        }
        chosen = {name: contents[name] for name in self._publish}
        archive.keep_copies(self.state, chosen)
        write_files({self.path / name: content for name, content in chosen.items()})
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in chosen.items()}
        archive.write_digests(self.state, digests)

    def phase(self, name: str) -> None:
        """Say in state/phase what the run does now; `metrics`, `checkpoint` and `publish` are said by themselves."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r}: choose from {', '.join(PHASES)}")
        self._phases += 1
        text = f"{self._phases} {self._last_step if self._last_step is not None else '-'} {name}"
        with writing(self.state / "phase"):
            os.pwrite(self._phase, text.ljust(PHASE_BYTES - 1).encode() + b"\n", 0)

    @property
    def stop_requested(self) -> bool:
        """Whether a stop signal has arrived: then save a checkpoint and call `stop`."""
        return self._stop.signal is not None

    def stop(self, step: int) -> NoReturn:
        """End the process with `EXIT_RESUMABLE` after the checkpoint of `step` was saved."""
        reason = self._stop.signal.name if self._stop.signal else "asked to stop"
        _say(f"{self.path}: {reason}: stopped after step {step}; the same command goes on from there")
        raise SystemExit(EXIT_RESUMABLE)

    def close(self) -> None:
        self._log.close()
        os.close(self._phase)


@dataclass(frozen=True)
class Phase:
    """What a run is doing: `count` rises with every phase, `step` is the last recorded one."""

    count: int
    step: int | None
    name: str


def read_phase(run_dir: str | Path) -> Phase | None:
    """The phase a run is in, or was in when it died; None before its first one."""
    try:
        words = (Path(run_dir) / "state" / "phase").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    return Phase(int(words[0]), None if words[1] == "-" else int(words[1]), words[2]) if words else None


@contextmanager
def _owned(run_dir: Path) -> Iterator[None]:
    """Own `run_dir` for the block, with its state in one piece."""
    state = run_dir / "state"
    for folder in (state, *(state / name for name in FOLDERS)):
        if folder.is_symlink():
            raise UserError(f"{folder}: is a symbolic link; a run's state must lie inside its folder")
    make_folder(state)
    with hold(state / "lock", f"run folder {run_dir}"):
        archive.finish_moves(state)
        yield


def _is_finished(state: Path) -> bool:
    return (state / archive.PUBLISHED).is_file()


def _refuse_to_overwrite(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Refuse declared files of another identity. A workflow deletes them before it trains anew; a start by hand, in
    front of the results of others, must not."""
    old = None
    if (run_dir / "run.json").is_file():
        with suppress(UserError):
            old = read_identity(run_dir / "run.json", "identity")
    elif _is_finished(run_dir / "state") and any((run_dir / name).is_file() for name in PRODUCTS):
        with suppress(UserError):
            old = read_identity(run_dir / "state/identity.json")
    if old is not None and (differing := differences(old, identity)):
        raise UserError(
            f"{run_dir}: holds a finished run of another identity ({_phrases(differing)}), which stays; "
            "name another folder for this one: --run-dir DIR"
        )


def _make_room(state: Path, identity: Mapping[str, Any], afresh: bool) -> Path | None:
    """Set aside what this start does not go on with; where the finished run that was the present one is now."""
    finished = None
    ours = archive.is_of(state, identity)
    if _is_finished(state):
        finished = archive.set_aside(state)
        _say(f"{state.parent}: is finished; its state is kept in {finished}, training starts afresh")
    if ours or afresh:
        if not ours and (state / "identity.json").exists():
            _say(f"{state.parent}: the unfinished state of another identity is kept in {archive.set_aside(state)}")
        return finished
    earlier = archive.newest(state, identity)
    if earlier is not None:
        if (state / "identity.json").exists():
            archive.set_aside(state)
        archive.bring_back(state, earlier)
        (state / archive.PUBLISHED).unlink(missing_ok=True)
        _say(f"{state.parent}: going on with the state of this identity that was set aside")
    return finished


def _check_identity(state: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Keep `identity` in state/identity.json, with the digests of other code that worked on this state before.

    Unfinished work of another identity is refused; other code is not: it is recorded, and `audit` reports it.
    """
    path = state / "identity.json"
    earlier: list[str] = []
    if checkpoint.paths(state / "checkpoints"):
        try:
            old = read_identity(path)
        except UserError as error:
            raise UserError(f"{error}; {_put_aside(state)}") from None
        differing = differences(old, identity)
        if differing:
            raise UserError(
                f"{state.parent}: holds an unfinished run of another identity ({_phrases(differing)}); "
                f"start with the old settings to finish it, or {_put_aside(state)}"
            )
        earlier = old["earlier_package_sha256"]
        if old["package_sha256"] != identity["package_sha256"]:
            earlier = [*earlier, old["package_sha256"]]
            _say(f"{state.parent}: the code changed since its checkpoint; the run goes on with today's")
    kept = {**identity, "earlier_package_sha256": earlier}
    write_file(path, (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode())
    return kept


def _phrases(differing: Sequence[str]) -> str:
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return "; ".join(differing[:3]) + more


def _put_aside(state: Path) -> str:
    return f"put it aside to train anew: mv {shlex.quote(str(state))} {shlex.quote(str(state) + '.old')}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
