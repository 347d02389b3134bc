"""`model/manifest.json`: which weights the experiment starts from, by pin and by the sha256 of every file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from score_centering.runs.files import write_file
from score_centering.settings.inputs import read_manifest, sha256_file, verify_files
from score_centering.settings.preflight import require_architecture

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
    return read_manifest(path, ModelManifest, SCHEMA_VERSION, "model")


def verified_folder(path: Path, engine: str | None = None) -> Path:
    """The folder of the weights that the manifest at `path` names, once every file has the recorded sha256.

    engine: `local` or `vllm`, where rollouts will be computed with them.

    Raises:
        UserError: the engine does not compute such a model; a file is missing or differs; the line names it.
    """
    manifest = read_model_manifest(path)
    folder = path.parent / manifest.path
    if engine is not None:
        require_architecture(folder, engine)
    verify_files(path, folder, manifest.files, "model")
    return folder
