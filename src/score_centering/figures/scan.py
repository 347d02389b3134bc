"""Many finished runs as one table: a row a run, with the settings in which they differ and how each of them ended."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from score_centering.figures.summary import OUTCOME, SUMMARY, run_row
from score_centering.runs import schema
from score_centering.settings import UserError
from score_centering.settings.dotted import differing
from score_centering.settings.inputs import read_json

RUN = {"experiment": pa.string(), "arm": pa.string(), "seed": pa.int32()}


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Run folders at or below `folders`, sorted: those that hold metrics.parquet and run.json.

    Raises:
        UserError: a folder that holds none.
    """
    found: set[Path] = set()
    for folder in folders:
        runs = {path.parent for path in folder.rglob("metrics.parquet") if path.with_name("run.json").is_file()}
        if not runs:
            raise UserError(f"{folder}: holds no finished run (metrics.parquet and run.json)")
        found |= runs
    return sorted(found)


def read_run(folder: Path, labels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`labels`, then experiment, arm and seed of the run in `folder`, then its `run_row`."""
    table = schema.read_metrics(folder / "metrics.parquet")
    written = {key: table.schema.metadata[key.encode()].decode() for key in RUN}
    return {**(labels or {}), **written, "seed": int(written["seed"]), **run_row(table.to_pandas())}


def differing_settings(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """For each run, the settings (dotted keys) that are not the same in all of them, from its run.json."""
    found = differing([run_config(folder) for folder in folders])
    return [{name: found[name][index] for name in sorted(found)} for index in range(len(folders))]


def scan(folders: Sequence[Path]) -> pa.Table:
    """One row a run of `folders` (see `find_runs`): differing settings, experiment, arm, seed, outcome."""
    runs = find_runs(folders)
    return scan_table([read_run(run, labels) for run, labels in zip(runs, differing_settings(runs), strict=True)])


def scan_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows of `read_run` as a table; labels become numbers where all of them are, else text."""
    labels = [name for name in rows[0] if name not in RUN and name not in OUTCOME]
    columns = {name: _label([row[name] for row in rows]) for name in labels}
    columns |= {name: pa.array([row[name] for row in rows], kind) for name, kind in RUN.items()}
    columns |= {name: pa.array([row[name] for row in rows], SUMMARY.field(name).type) for name in OUTCOME}
    fields = [SUMMARY.field(name) if name in OUTCOME else pa.field(name, array.type) for name, array in columns.items()]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def write_table(table: pa.Table, path: Path) -> None:
    """`table` as parquet with its schema's metadata, the same bytes for the same rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    path.write_bytes(schema.table_bytes(table, metadata))


def described(columns: Sequence[tuple[str, pa.DataType, str, str]]) -> pa.Schema:
    """A schema from (name, type, unit, definition) of each column."""
    return pa.schema(
        [pa.field(name, kind, metadata={"unit": unit, "definition": text}) for name, kind, unit, text in columns]
    )


def _label(values: Sequence[Any]) -> pa.Array:
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(
        [value if value is None or isinstance(value, str) else json.dumps(value) for value in values], pa.string()
    )


def run_config(folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder`, as its run.json has them."""
    return read_json(folder / "run.json")["identity"]["config"]
