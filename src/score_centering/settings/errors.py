"""The one kind of error that is the user's to mend, and how a program ends on it."""

import sys
from collections.abc import Callable

USAGE_EXIT_CODE = 2


class UserError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what is allowed."""


def run_main(main: Callable[[], int | None]) -> None:
    """Run a program's `main` and exit with its status; a `UserError` becomes `error: …` on stderr and exit code 2."""
    try:
        status = main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE) from None
    raise SystemExit(status or 0)
