"""Checkpoints: a folder of tensors.safetensors and checkpoint.json, whole or absent, verified on every read.

torch is imported inside the two functions that need it, so that figures, audit and watch start without it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from score_centering.runs.files import (
    make_folder,
    partial,
    sync_file,
    sync_folder,
    write_fault,
    write_file,
    writing,
)
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
KEPT = 2  # the newest one and the one before it
TENSORS, MANIFEST = "tensors.safetensors", "checkpoint.json"


class DamagedError(ValueError):
    """A checkpoint that must not be resumed from; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """State after update `step`, and the length (bytes) and digest of the metrics log that belongs to it."""

    step: int
    tensors: dict[str, "Tensor"]
    scalars: dict[str, Any]
    log_bytes: int
    log_sha256: str


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder`/step<n>; older ones beyond `KEPT` are removed after it is safe on the disk."""
    target = folder / f"step{checkpoint.step:06d}"
    temporary = partial(target)
    scalars = _as_json(checkpoint.scalars)
    make_folder(folder)
    remove(temporary)
    try:
        make_folder(temporary)
        _write_tensors(temporary / TENSORS, checkpoint.tensors)
        manifest = {
            "format": FORMAT,
            "step": checkpoint.step,
            "log_bytes": checkpoint.log_bytes,
            "log_sha256": checkpoint.log_sha256,
            "tensors_sha256": sha256_file(temporary / TENSORS),
            "scalars": scalars,
        }
        write_file(temporary / MANIFEST, json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode())
        with writing(target):
            os.replace(temporary, target)
            sync_folder(folder)
    except UserError:
        remove(temporary)
        raise
    for path in paths(folder)[KEPT:]:
        discard(path)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte checked against its digests.

    Raises:
        DamagedError: a missing, truncated or changed file.
    """
    from safetensors.torch import load_file

    try:
        manifest = dict(json.loads((path / MANIFEST).read_bytes()))
        digest = manifest.pop("sha256")
    except (OSError, ValueError, TypeError, KeyError):
        raise DamagedError(f"{MANIFEST} is missing or unreadable") from None
    if digest != _digest(manifest):
        raise DamagedError(f"{MANIFEST} was changed after it was written")
    if manifest["format"] != FORMAT:
        raise DamagedError(f"its format is {manifest['format']}, this code reads {FORMAT}")
    try:
        tensors_digest = sha256_file(path / TENSORS)
    except OSError:
        raise DamagedError(f"{TENSORS} is missing or unreadable") from None
    if tensors_digest != manifest["tensors_sha256"]:
        raise DamagedError(f"{TENSORS} does not have the sha256 it was written with")
    return Checkpoint(
        manifest["step"],
        load_file(path / TENSORS, device="cpu"),
        manifest["scalars"],
        manifest["log_bytes"],
        manifest["log_sha256"],
    )


def paths(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, the newest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if re.fullmatch(r"step\d{6,}", path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step")), reverse=True)


def next_number(folder: Path, prefix: str = "") -> int:
    """One more than the largest n of the names `prefix`<n> in `folder`; 1 when there is none."""
    numbers = (path.name.removeprefix(prefix) for path in folder.iterdir() if path.name.startswith(prefix))
    return max((int(number) for number in numbers if re.fullmatch(r"[0-9]{1,9}", number)), default=0) + 1


def set_aside(path: Path, folder: Path) -> Path:
    """Move a damaged checkpoint into `folder`, where nothing resumes from it; returns its new path."""
    make_folder(folder)
    target = folder / f"{path.name}-{next_number(folder, f'{path.name}-')}"
    with writing(target):
        os.replace(path, target)
    return target


def discard(path: Path) -> None:
    """Remove a checkpoint; a kill in between leaves no half one under a real name."""
    with writing(path):
        os.replace(path, partial(path))
    remove(partial(path))


def remove(path: Path) -> None:
    if path.exists():
        with writing(path):
            shutil.rmtree(path)


def _write_tensors(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise UserError(write_fault(path, int(number[1]))) from error
    with writing(path):
        sync_file(path)


def _as_json(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `scalars` that equals what a reader will get back."""
    try:
        copy = json.loads(json.dumps(scalars, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint scalars must be JSON values: {error}") from None
    if copy != scalars:
        raise ValueError("checkpoint scalars must survive JSON unchanged: use text keys and lists, not tuples")
    return copy


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
