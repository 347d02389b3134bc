"""Files that are whole or absent: written under a temporary name, synced, then renamed."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from score_centering.settings import UserError

ADVICE = {
    errno.ENOSPC: "free some space and start the same command again; it goes on from the last checkpoint",
    errno.EDQUOT: "raise the quota and start the same command again; it goes on from the last checkpoint",
    errno.EFBIG: "raise the file-size limit (ulimit -f) and start the same command again",
    errno.EROFS: "the results folder must be writable",
    errno.EACCES: "the results folder must be writable",
    errno.EPERM: "the results folder must be writable",
    errno.ENOTDIR: "every part of the results path must be a folder",
    errno.EEXIST: "every part of the results path must be a folder",
    errno.ELOOP: "symbolic links are not followed inside a run folder",
    errno.ENAMETOOLONG: "use a shorter path",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into one line about `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(write_fault(path, error.errno or 0)) from error


def write_fault(path: Path, number: int) -> str:
    """One line for error `number` (errno) of a write to `path`, with what to do about it."""
    return (
        f"cannot write {path}: {os.strerror(number).lower()}; {ADVICE.get(number, 'no half-written file was declared')}"
    )


def make_folder(path: Path) -> None:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, atomically and durably."""
    write_files({path: content})


def write_files(contents: Mapping[Path, bytes]) -> None:
    """As `write_file`; all contents are on the disk before the first name changes."""
    try:
        for path, content in contents.items():
            with writing(path):
                _write_new(partial(path), content)
    except UserError:
        for path in contents:
            partial(path).unlink(missing_ok=True)
        raise
    for path in contents:
        with writing(path):
            os.replace(partial(path), path)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def partial(path: Path) -> Path:
    """The temporary name of `path`, in the same folder; a leftover of a kill is overwritten by the next write."""
    return path.with_name(f".{path.name}.partial")


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
