"""Scalars of TensorBoard event files. The format is small enough to read without TensorBoard.

A file is a row of TFRecords: uint64 length, masked CRC-32C of it, that many bytes, their masked CRC-32C, little endian.
Each holds a protocol-buffer `Event`: step in field 2, a `Summary` in field 5; that repeats `Value`s in field 1 with a
tag in field 1 and either `simple_value` (field 2, float32) or a scalar `TensorProto` (field 8).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from score_centering.settings import UserError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
HEADER, FOOTER = 12, 4
DT_FLOAT, DT_DOUBLE = 1, 2


def read_events(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of each scalar, in the file's order. A torn last record, as in a running job, ends the file.

    Raises:
        UserError: a record before the end is no event.
    """
    content = path.read_bytes()
    offset = 0
    while offset + HEADER <= len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        end = offset + HEADER + length + FOOTER
        if end > len(content):
            return
        try:
            yield from _event(content[offset + HEADER : end - FOOTER])
        except (struct.error, IndexError, UnicodeDecodeError, ValueError):
            raise UserError(f"{path}: no TensorBoard event at byte {offset}") from None
        offset = end


def _event(record: bytes) -> list[tuple[int, str, float]]:
    step, summaries = 0, []
    for field, value in _fields(record):
        if field == 2:
            step = value if value < 2**63 else value - 2**64
        elif field == 5:
            summaries.append(value)
    scalars = (_scalar(value) for summary in summaries for field, value in _fields(summary) if field == 1)
    return [(step, tag, number) for tag, number in scalars if number is not None]


def _scalar(message: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, value in _fields(message):
        if field == 1:
            tag = value.decode()
        elif field == 2:
            (number,) = struct.unpack("<f", value)
        elif field == 8:
            number = _tensor(value)
    return tag, number


def _tensor(message: bytes) -> float | None:
    """The one number of a scalar tensor of floats; None of any other tensor, such as a text or a histogram."""
    kind, content, listed = 0, b"", []
    for field, value in _fields(message):
        if field == 1:
            kind = value
        elif field == 4:
            content = value
        elif field in (5, 6):
            listed.append((field, value))
    code = {DT_FLOAT: "<f", DT_DOUBLE: "<d"}.get(kind)
    if code is None:
        return None
    packed = content or (listed[0][1] if len(listed) == 1 else b"")
    return struct.unpack(code, packed)[0] if len(packed) == struct.calcsize(code) else None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        kind = key & 7
        if kind == VARINT:
            value, offset = _varint(message, offset)
        elif kind == BYTES:
            length, offset = _varint(message, offset)
            value, offset = message[offset : offset + length], offset + length
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
            value, offset = message[offset : offset + length], offset + length
        else:
            raise ValueError(f"wire type {kind}")
        if offset > len(message):
            raise ValueError("cut short")
        yield key >> 3, value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[offset]
        result |= (byte & 127) << shift
        offset += 1
        if byte < 128:
            return result, offset
        shift += 7
        if shift > 63:
            raise ValueError("varint of more than 64 bits")
