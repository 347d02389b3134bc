"""States of one run folder that are not the present one: set aside, brought back, and the declared files they keep.

A state is what lies in <run_dir>/state beside `lock` and `archive`. It moves as a whole: into archive/.aside and from
there, by one rename, to archive/<n>; back from archive/<n>, by one rename, into archive/.back and from there into the
state. A kill in between is mended by `finish_moves`, which every start calls first. A published state holds copies of
its declared files in `published/`, so that a finished run survives whoever deletes or overwrites them.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from score_centering.runs.checkpoint import next_number, remove
from score_centering.runs.files import make_folder, sync_folder, write_file, writing
from score_centering.runs.identity import differences, read_identity
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json, sha256_file

ARCHIVE, PUBLISHED, COPIES = "archive", "PUBLISHED", "published"
STAYING = (ARCHIVE, "lock")
ASIDE, BACK = ".aside", ".back"


def finish_moves(state: Path) -> None:
    """Finish a move that a kill interrupted."""
    archive = state / ARCHIVE
    if (archive / ASIDE).is_dir():
        set_aside(state)
    if (archive / BACK).is_dir():
        _move_back(state)


def set_aside(state: Path) -> Path:
    """Move the present state into the archive; its new folder."""
    archive = state / ARCHIVE
    aside = archive / ASIDE
    make_folder(aside)
    with writing(aside):
        # PUBLISHED last: what is left behind by a kill still says whether it is finished.
        for name in sorted(_names(state), key=lambda name: name == PUBLISHED):
            os.replace(state / name, aside / name)
        target = archive / f"{next_number(archive):04d}"
        os.replace(aside, target)
        sync_folder(archive)
    return target


def bring_back(state: Path, archived: Path) -> None:
    """Make `archived` the present state; what is there now must have been set aside."""
    with writing(archived):
        os.replace(archived, state / ARCHIVE / BACK)
    _move_back(state)


def drop(state: Path) -> None:
    """Remove the present state, of a start that has recorded nothing."""
    for name in _names(state):
        path = state / name
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            with writing(path):
                path.unlink()


def newest(state: Path, identity: Mapping[str, Any] | None = None, finished: bool = False) -> Path | None:
    """The newest archived state; only one of `identity`, and only a finished one, where these are asked for."""
    archive = state / ARCHIVE
    folders = (path for path in archive.iterdir() if path.name.isdecimal()) if archive.is_dir() else ()
    for path in sorted(folders, key=lambda path: int(path.name), reverse=True):
        if finished and not (path / PUBLISHED).is_file():
            continue
        if identity is None or is_of(path, identity):
            return path
    return None


def is_of(state: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a state was made from `identity`; one whose own can't be read was not."""
    try:
        return not differences(read_identity(state / "identity.json"), identity)
    except UserError:
        return False


def keep_copies(state: Path, contents: Mapping[str, bytes]) -> None:
    """Keep the declared files' `contents`, by name, in the state."""
    make_folder(state / COPIES)
    for name, content in contents.items():
        write_file(state / COPIES / name, content)


def copies(state: Path) -> dict[str, Path] | None:
    """The kept copies of a published state by their declared names; None when one is not what was published."""
    try:
        digests = read_json(state / PUBLISHED)
        kept = {name: state / COPIES / name for name in digests}
        return kept if all(sha256_file(path) == digests[name] for name, path in kept.items()) else None
    except (OSError, UserError):
        return None


def declare(run_dir: Path, kept: Mapping[str, Path]) -> list[str]:
    """Put the `copies` that are missing or changed in `run_dir` back, with the times of their making; their names.

    With those times a workflow still sees which settings are newer than the files.
    """
    changed = [
        name
        for name, path in kept.items()
        if not (run_dir / name).is_file() or (run_dir / name).read_bytes() != path.read_bytes()
    ]
    for name in changed:
        write_file(run_dir / name, kept[name].read_bytes())
        shutil.copystat(kept[name], run_dir / name)
    return changed


def declare_lost(experiment: Path) -> list[Path]:
    """Put the declared files of finished runs below `experiment` back where every one of them is gone; the folders.

    This is for a workflow that deleted them ahead of a job that then could not start.
    """
    folders = []
    for mark in sorted(experiment.glob(f"**/state/{PUBLISHED}")):
        run_dir, kept = mark.parents[1], copies(mark.parent)
        if kept and not any((run_dir / name).exists() for name in kept):
            declare(run_dir, kept)
            folders.append(run_dir)
    return folders


def read_digests(state: Path) -> dict[str, Any] | None:
    """What the declared files beside `state` were published with: by it, or by the finished run before it."""
    source = state if (state / PUBLISHED).is_file() else newest(state, finished=True)
    return read_json(source / PUBLISHED) if source else None


def write_digests(state: Path, digests: Mapping[str, str]) -> None:
    write_file(state / PUBLISHED, (json.dumps(digests, indent=2) + "\n").encode())


def _move_back(state: Path) -> None:
    back = state / ARCHIVE / BACK
    with writing(back):
        for name in sorted(_names(back), key=lambda name: name == PUBLISHED):
            os.replace(back / name, state / name)
        back.rmdir()
        sync_folder(state)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name not in STAYING]
