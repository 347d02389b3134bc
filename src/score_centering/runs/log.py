"""The append-only metrics log: one line a step, each with its own checksum.

A line is `<crc32 of the JSON, 8 hex digits> {"metrics": {…}, "step": n, "timing": {…}}`. JSON keeps float64 exactly.
"""

import hashlib
import json
import math
import operator
import os
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from score_centering.runs.files import write_all, writing
from score_centering.settings import UserError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class MetricsLog:
    """The open log of one run; only its lock holder may have it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o666)

    def append(self, line: bytes) -> None:
        """Append whole or not at all."""
        size = self.size()
        try:
            with writing(self.path):
                write_all(self._descriptor, line)
        except UserError:
            os.ftruncate(self._descriptor, size)
            raise

    def size(self) -> int:
        """Bytes of the log."""
        return os.fstat(self._descriptor).st_size

    def prefix_sha256(self, size: int) -> str | None:
        """Digest of the first `size` bytes; None when the log is shorter."""
        content = os.pread(self._descriptor, size, 0) if size <= self.size() else None
        return None if content is None else hashlib.sha256(content).hexdigest()

    def truncate(self, size: int) -> None:
        with writing(self.path):
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Records `{"step", "metrics", "timing"}` of a log, up to the first line that is torn or damaged."""
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        record = decode(line)
        if record is None:
            break
        records.append(record)
    return records


def encode(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> bytes:
    text = json.dumps({"step": step, "metrics": metrics, "timing": timing}, sort_keys=True, allow_nan=False).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one line without its newline; None when its checksum is wrong."""
    checksum, _, text = line.partition(b" ")
    return json.loads(text) if checksum == b"%08x" % zlib.crc32(text) else None


def to_row(values: Mapping[str, Any], schema: pa.Schema, step: int) -> dict[str, Any]:
    """`values` as JSON numbers of the columns of `schema`, absent ones as null.

    Raises:
        UserError: an unknown column, a value that is not finite or not of the column's type, a negative duration.
    """
    unknown = sorted(set(values) - (set(schema.names) - {"step"}))
    if unknown:
        raise UserError(f"step {step}: unknown column {', '.join(unknown)}; columns are declared in runs/schema.py")
    return {field.name: _number(values.get(field.name), field, step) for field in schema if field.name != "step"}


def to_table(records: list[dict[str, Any]], part: str, schema: pa.Schema) -> pa.Table:
    """The `part` ("metrics" or "timing") of `records` as a table, one row a step."""
    rows = [{"step": record["step"], **record[part]} for record in records]
    return pa.Table.from_arrays(
        [pa.array([row[field.name] for row in rows], type=field.type) for field in schema], schema=schema
    )


def _number(value: Any, field: pa.Field, step: int) -> int | float | None:
    if value is None:
        return None
    where = f"step {step}: {field.name} = {value!r}"
    if pa.types.is_timestamp(field.type):
        if not isinstance(value, datetime) or value.tzinfo is None:
            raise UserError(f"{where}: must be a datetime with its time zone")
        return (value - EPOCH) // MICROSECOND
    if isinstance(value, bool | str | bytes):
        raise UserError(f"{where}: must be a number")
    if pa.types.is_integer(field.type):
        try:
            number = operator.index(value)
        except TypeError:
            raise UserError(f"{where}: must be a whole number") from None
        if abs(number) >= 1 << (field.type.bit_width - 1):
            raise UserError(f"{where}: does not fit {field.type}")
        return number
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: must be a number") from None
    if not math.isfinite(number):
        raise UserError(f"{where}: not finite; nothing was recorded, the run can be resumed from its last checkpoint")
    if field.metadata[b"unit"] == b"s" and number < 0:
        raise UserError(f"{where}: a duration can't be negative; take it from a monotonic clock")
    return number
