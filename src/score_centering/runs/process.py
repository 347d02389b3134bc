"""How a run stops: signals that ask for a checkpoint, and a parent that dies."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from score_centering.settings import UserError

EXIT_RESUMABLE = 75  # EX_TEMPFAIL: a checkpoint is written, the same command goes on from it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1


class StopFlag:
    """Which stop signal has arrived, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._owner = os.getpid()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker: it has no run folder, so it just ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(
            f"{self.signal.name}: finishing this step, then writing a checkpoint (Ctrl-C twice stops at once)",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Within the block, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 only set the flag. Main thread only."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag.handle) for number in STOP_SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send `number` to this process when its parent dies, however the parent dies.

    Call it first thing in a worker or in a trainer that Snakemake started; `parent` is the pid that the parent
    passed on, so that a parent which died before the call is noticed too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise UserError(f"process {parent}, which started this one, has already ended")
