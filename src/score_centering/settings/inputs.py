"""Reading what other stages wrote: digests, JSON objects, manifests; every fault is one line that names the file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from score_centering.settings.errors import UserError

M = TypeVar("M")


def sha256_file(path: Path) -> str:
    """sha256 of the content of `path`, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(manifest: Path, folder: Path, recorded: Mapping[str, str], what: str) -> None:
    """Checks that each file of `recorded` lies in `folder` with the sha256 that `manifest` gives it.

    Raises:
        UserError: a file is missing or differs; the line names it, and that `what` is to be prepared again.
    """
    for name, digest in recorded.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: missing, though {manifest} names it; prepare the {what} again")
        if (found := sha256_file(file)) != digest:
            raise UserError(f"{file}: sha256 {found} is not the {digest} of {manifest}; prepare the {what} again")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        UserError: the file can't be read, is not JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def read_manifest(path: Path, kind: type[M], version: int, what: str) -> M:
    """The dataclass `kind` that was written as JSON to `path`; `what` names its subject in faults.

    Raises:
        UserError: as `read_json`, or another schema version, set of keys, or type of a value.
    """
    content = read_json(path)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    refusal = f"{path}: no {what} manifest of schema version {version}; prepare the {what} again"
    if content.get("schema_version") != version or set(content) != names:
        raise UserError(refusal)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{refusal} ({place}: {error.errors()[0]['msg']})") from None
