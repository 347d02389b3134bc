"""How a program ends on a user's error."""

import errno
import gc
import sys
from collections.abc import Callable

from score_centering.user_error import UserError

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells say it
# Faults of the disk or of permissions that any write of any library can meet.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
# Importing torch and transformers creates millions of objects that live as long as the program. Looking for garbage
# among them every 700 new ones, as Python does, takes a fifth of the start; doing so once more at the exit, another.
GARBAGE_THRESHOLD = 50_000


def run_main(main: Callable[[], int | None]) -> None:
    """Run a program's `main` and exit with its status.

    A `UserError`, or a disk that is full or not writable, becomes `error: …` on stderr and exit code 2; Ctrl-C outside
    of a training step becomes exit code 130.
    """
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        status = main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE) from None
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        print(f"error: {error.filename or 'cannot write'}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    finally:
        gc.freeze()
    raise SystemExit(status or 0)
