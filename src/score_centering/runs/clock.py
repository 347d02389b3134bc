"""Durations by the monotonic clock, so that a wall clock set back never makes a negative one."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Stopwatch:
    """Adds up seconds by name; `lap` returns and clears them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far.

    `getrusage` would not do: what it reports for a started program includes the process that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024
