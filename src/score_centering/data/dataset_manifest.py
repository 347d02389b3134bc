"""`manifest.json` names a prepared dataset exactly: the pin of its source and the sha256 of every file."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.data.problems import Problem
from score_centering.settings import UserError
from score_centering.settings.inputs import read_manifest, verify_files

SCHEMA_VERSION = 1
SPLITS = ("train", "test")
TABLE_SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in Problem._fields])


@dataclass(frozen=True)
class Manifest:
    """A prepared dataset.

    source: kind and pin of the source.  source_files: sha256 of each file of the source, by name.
    files: {"train.parquet": {"sha256", "rows"}, "test.parquet": …}, beside the manifest.
    rows_read: rows of the source.  dropped: how many of them were dropped, by reason.
    split: {"seed", "val_size", "train_size", "min_solve_rate", "max_solve_rate"}.
    versions: of the libraries that wrote the files.
    """

    schema_version: int
    source: dict[str, Any]
    source_files: dict[str, str]
    files: dict[str, dict[str, Any]]
    rows_read: int
    dropped: dict[str, int]
    split: dict[str, Any]
    versions: dict[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def load_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest at `path`, once every file it names is there with the recorded sha256; else a `UserError`."""
    path = Path(path)
    manifest = read_manifest(path, Manifest, SCHEMA_VERSION, "dataset")
    if set(manifest.files) != {f"{split}.parquet" for split in SPLITS}:
        raise UserError(f"{path}: must name train.parquet and test.parquet; prepare the dataset again")
    recorded = {name: str(file.get("sha256")) for name, file in manifest.files.items()}
    verify_files(path, path.parent, recorded, "dataset")
    return manifest


def read_split(manifest_path: str | os.PathLike[str], split: str) -> list[Problem]:
    """The problems of split "train" or "test", in file order, after `load_manifest` has verified the files."""
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
    load_manifest(manifest_path)
    return read_table(Path(manifest_path).parent / f"{split}.parquet")


def is_prepared(path: Path) -> bool:
    """Whether a file is a parquet table with exactly the columns of a split."""
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return pq.read_schema(path).equals(TABLE_SCHEMA)
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return False  # whoever reads it says what is wrong


def read_table(path: Path) -> list[Problem]:
    """The problems of one parquet file with the columns prompt, answer, id and source."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        table.validate(full=True)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable parquet file: {' '.join(str(error).split())[:200]}") from None
    if not table.schema.equals(TABLE_SCHEMA):
        found = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        raise UserError(f"{path}: columns must be prompt, answer, id, source (string), found {found}")
    return [Problem(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]
