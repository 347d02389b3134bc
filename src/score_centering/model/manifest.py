"""`model/manifest.json`: which weights the experiment starts from, by pin and by the sha256 of every file."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from score_centering.runs.files import sha256_file, write_file
from score_centering.settings import UserError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelManifest:
    """Base weights.

    source: kind and pin.  path: the folder that holds them, relative to the manifest, or absolute (a hub snapshot or
    the user's own folder, referenced and never copied).  files: sha256 by name.  parameters: their number.
    warm_start: steps taken and reward measured, or None.  dataset_sha256: of the dataset manifest it was warmed on.
    versions: of the libraries that wrote the weights.
    """

    schema_version: int
    source: dict[str, Any]
    path: str
    files: dict[str, str]
    parameters: int
    warm_start: dict[str, Any] | None
    dataset_sha256: str | None
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        write_file(path, (json.dumps(asdict(self), indent=2, sort_keys=True) + "\n").encode())


def digest_folder(folder: Path) -> dict[str, str]:
    """sha256 of each file right below `folder`, by name."""
    return {file.name: sha256_file(file) for file in sorted(folder.iterdir()) if file.is_file()}


def read_model_manifest(path: Path) -> ModelManifest:
    """The manifest at `path`.

    Raises:
        UserError: missing, not JSON, or of another schema.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    names = {field.name for field in fields(ModelManifest)}
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION or set(content) != names:
        raise UserError(f"{path}: no model manifest of schema version {SCHEMA_VERSION}; prepare the model again")
    return ModelManifest(**content)


def verified_folder(path: Path) -> Path:
    """The folder of the weights that the manifest at `path` names, once every file has the recorded sha256.

    Raises:
        UserError: a file is missing or differs; the line names it.
    """
    manifest = read_model_manifest(path)
    folder = path.parent / manifest.path
    for name, recorded in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: missing, though {path} names it; prepare the model again")
        if (found := sha256_file(file)) != recorded:
            raise UserError(f"{file}: sha256 {found} is not the {recorded} of {path}; prepare the model again")
    return folder
