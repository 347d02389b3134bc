"""Problems in local parquet or JSONL files, pinned by the sha256 of each file."""

from pathlib import Path

from score_centering.data.source import Source
from score_centering.data.tables import AS_NAMED, SUFFIXES, Reading, read_rows
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file


def open_local(path: str, reading: Reading = AS_NAMED, key: str = "dataset.local.path") -> Source:
    """A parquet or JSONL file, or a folder of them (in the order of their names); `key` is named where it is none."""
    root = Path(path)
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    else:
        files = [root] if root.is_file() and root.suffix in SUFFIXES else []
    if not files:
        raise UserError(f"{key}: {path} is no {' or '.join(SUFFIXES)} file and no folder with one")
    base = root if root.is_dir() else root.parent
    digests = {file.relative_to(base).as_posix(): sha256_file(file) for file in files}
    pin = {"kind": "local", "path": path, **reading.pin()}
    return Source(name=f"local/{root.name}", rows=read_rows(files, reading), pin=pin, files=digests)
