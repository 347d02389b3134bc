"""One owner: `flock` on a file that names its holder. The kernel drops the lock when the holder dies."""

import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from score_centering.runs.files import make_folder, write_all, writing
from score_centering.settings import UserError

PROBE_PATIENCE_S = 0.2  # `in_use` holds a lock for an instant; whoever names nobody may be only that

_held: set[int] = set()


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at `path` for the block; its file says which process on which host does.

    Raises:
        UserError: another process holds it; the line names that process's pid and host.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if not _take(descriptor, path):
            raise UserError(
                f"{what} is in use by {read_owner(path) or 'another process'}; wait for it, or stop it "
                "(it then writes a checkpoint), and start again"
            )
        _held.add(descriptor)
        if owner := read_owner(path):
            print(f"{what}: {owner} ended without releasing it; going on", file=sys.stderr, flush=True)
        with writing(path):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> bool:
    """Whether the lock was to be had; a holder that stays nameless is waited for a little."""
    deadline = time.monotonic() + PROBE_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if read_owner(path) or time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def read_owner(path: Path) -> str | None:
    """`process <pid> on <host>` as the lock file says; None when it names nobody."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(owner['pid'])} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def in_use(path: Path) -> bool:
    """Whether a process holds the lock at `path` right now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def gpu_lease(gpu: str, places: int = 1) -> Iterator[None]:
    """Hold one of the `places` on the GPU of this host whose UUID is `gpu`, against other runs of the same user.

    The lease is a lock in the user's runtime folder (`XDG_RUNTIME_DIR`, else the temporary folder): it must be seen
    by runs of any results folder, and it vanishes with the machine. An index would not do: a batch system numbers the
    GPUs of each of its jobs from 0.

    Raises:
        UserError: every place is taken; the line names the holder of the last.
    """
    folder = runtime_folder()
    make_folder(folder)
    what = f"GPU {gpu}" if places == 1 else f"GPU {gpu}, shared by {places} runs,"
    for place in range(places):
        with ExitStack() as stack:
            try:
                stack.enter_context(hold(folder / f"gpu-{gpu}-{place}.lock", what))
            except UserError:
                if place == places - 1:
                    raise
                continue
            yield
            return


def runtime_folder() -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return base / f"score-centering-{os.getuid()}"


def _release_in_child() -> None:
    """A forked worker shares the lock's open file: closing it there keeps the lock with its owner alone."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
