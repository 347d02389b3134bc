"""Several programs that belong together: one log each, and none is left when they end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

POLL_SECONDS = 0.05


class Programs:
    """Programs with their logs in `folder`; whatever ends the `with` block ends them too.

    Each is the leader of a session of its own, so a terminal's Ctrl-C reaches only the process that started them, and
    its whole group can be killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(list(self._running), grace_seconds=5)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `command`; what it prints goes to `<folder>/<name>.log`."""
        with self.log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def ended(self) -> dict[str, int]:
        """Exit codes, by name, of those that have ended; negative: the signal that did it."""
        codes = {name: process.poll() for name, process in self._running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def terminate(self, name: str) -> None:
        """Ask one of them to end."""
        with contextlib.suppress(ProcessLookupError):
            self._running[name].terminate()

    def stop(self, names: Sequence[str], grace_seconds: float) -> None:
        """End programs: SIGTERM, and after `grace_seconds` SIGKILL to each one's whole group."""
        for name in names:
            self.terminate(name)
        deadline = time.monotonic() + grace_seconds
        for name in names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[name].wait(max(0.0, deadline - time.monotonic()))
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running[name].pid, signal.SIGKILL)
            self._running[name].wait()


class Follower:
    """Copies what is appended to a log to stderr."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def copy(self) -> None:
        sys.stderr.write(self._file.read().decode(errors="replace"))
        sys.stderr.flush()


class StopSignals:
    """Counts SIGINT and SIGTERM for the block; the handlers that were set before come back after it."""

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.count += 1
        self.last = signal.Signals(number)
