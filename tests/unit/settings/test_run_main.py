"""How a program ends."""

import errno
import os

import pytest

from score_centering.settings import UserError, run_main


def ended(capsys, error: BaseException | None, status: int | None = None) -> tuple[int, str]:
    def main() -> int | None:
        if error is not None:
            raise error
        return status

    with pytest.raises(SystemExit) as stop:
        run_main(main)
    return stop.value.code, capsys.readouterr().err


def test_statuses(capsys):
    assert ended(capsys, None) == (0, "")
    assert ended(capsys, None, 3) == (3, "")


def test_bad_input_is_a_line_each(capsys):
    assert ended(capsys, UserError("a: unknown key\nb: missing")) == (2, "error: a: unknown key\nerror: b: missing\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_more_is_one_line(capsys, number):
    fault = OSError(number, os.strerror(number), "results/x/train.parquet")
    assert ended(capsys, fault) == (2, f"error: results/x/train.parquet: {os.strerror(number).lower()}\n")


def test_another_error_of_the_system_is_a_bug(capsys):
    with pytest.raises(FileNotFoundError):
        run_main(lambda: os.stat("nowhere"))


def test_ctrl_c(capsys):
    assert ended(capsys, KeyboardInterrupt()) == (130, "error: interrupted\n")
