"""What tests of several rooms share."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import axis_names
from score_centering.settings import UserError

axis_names.install()


@dataclass(frozen=True)
class Ended:
    """How a child process ended: its exit code, or the negative of the signal that killed it."""

    code: int
    stderr: str


def run_in_fork(function: Callable[[], Any]) -> Ended:
    """Call `function` in a child process, which may be killed or change what it likes."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            code = 70
            try:
                function()
                code = 0
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                code = 2
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), output.read())


@pytest.fixture(scope="session")
def fork() -> Callable[[Callable[[], Any]], Ended]:
    return run_in_fork
