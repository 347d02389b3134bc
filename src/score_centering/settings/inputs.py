"""Reading what other stages wrote: digests, JSON objects, manifests; every fault is one line that names the file."""

import hashlib
import json
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
