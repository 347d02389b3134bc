"""vLLM's routes, decoded into one tensor: the way that `routing.py` measures. No program asks vLLM for routes.

vLLM returns the expert choices of a rollout as base64 of `np.save` bytes: (tokens − 1, layers, top-k) uint8 or uint16,
the tokens being prompt and response. Each payload is decoded alone and copied straight into its place, so no more than
one array exists beside the result. Nothing is unpickled.
"""

import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What np.save writes before the data, version 1.0 (numpy.lib.format); read by pattern, so nothing of it is evaluated.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>[\x00-\xff]{2})\{'descr': '(?P<dtype>[!-&(-~]*)', "
    rb"'fortran_order': (?P<fortran>True|False), 'shape': \((?P<shape>|\d+,|\d+(?:, \d+)+)\), \} *\n"
)
_DTYPES = (b"|u1", b"<u2", b">u2")


@dataclass(frozen=True)
class RoutedRow:
    """A rollout's payload and what its shape must agree with.

    name: the rollout, for errors.
    payload: base64 text; None where the engine returned none, which is an error.
    prompt_tokens, response_tokens: of the whole rollout, before any cut.
    """

    name: str
    payload: str | bytes | None
    prompt_tokens: int
    response_tokens: int


def decode_routes(
    rows: Iterable[RoutedRow],
    *,
    count: int,
    prompt_length: int,
    response_length: int,
    layers: int,
    top_k: int,
    experts: int,
) -> Tensor:
    """The routes of all rows as one tensor (rows, P + R, layers, top-k), P and R being the two lengths.

    A prompt is right-aligned before position P and keeps its first P tokens; a response starts at P and keeps its
    first R. Padding, and the last token of a rollout, which is never fed, stay 0. `rows` may be a generator: a row is
    asked for when the one before it is in place.

    Args:
        count: rows that must come.
        experts: experts a layer; up to 256 the result is uint8, beyond that uint16.

    Raises:
        ValueError: a missing row or payload; a payload that is no `np.save` array, or has another shape, dtype or
            length; an expert id outside 0 … experts − 1. The line names the row.
    """
    dtype = torch.uint8 if experts <= 256 else torch.uint16
    routes = torch.zeros((count, prompt_length + response_length, layers, top_k), dtype=dtype)
    places = routes.numpy()
    arrived = 0
    for row in rows:
        if arrived == count:
            raise ValueError(f"routes: more than the {count} rows that were announced, the next is {row.name}")
        _place(_decode(row, layers, top_k, experts), row.prompt_tokens, prompt_length, places[arrived])
        arrived += 1
    if arrived < count:
        raise ValueError(f"routes: {arrived} rows of {count} came, rows from {arrived} on are missing")
    return routes


def _place(array: np.ndarray, prompt_tokens: int, prompt_length: int, place: np.ndarray) -> None:
    """Copies one rollout's routes (tokens − 1, …) into its row (P + R, …)."""
    kept = min(prompt_tokens, prompt_length)
    place[prompt_length - kept : prompt_length] = array[:kept]
    response = array[prompt_tokens:][: len(place) - prompt_length]
    place[prompt_length : prompt_length + len(response)] = response


def _decode(row: RoutedRow, layers: int, top_k: int, experts: int) -> np.ndarray:
    """The checked array of a payload, a view of its decoded bytes."""
    tokens = row.prompt_tokens + row.response_tokens
    if row.payload is None:
        raise ValueError(f"routes of {row.name}: the engine returned none (is routing replay switched on there?)")
    if row.prompt_tokens < 1 or row.response_tokens < 1:
        raise ValueError(f"routes of {row.name}: a rollout has at least one token of prompt and one of response")
    try:
        raw = binascii.a2b_base64(row.payload, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"routes of {row.name}: not base64 ({error})") from None
    header = _HEADER.match(raw)
    if header is None or int.from_bytes(header["length"], "little") != header.end() - header.end("length"):
        raise ValueError(f"routes of {row.name}: not the bytes of np.save (.npy version 1.0)")
    if header["dtype"] not in _DTYPES:
        raise ValueError(f"routes of {row.name}: dtype is {header['dtype'].decode()}, allowed are uint8 and uint16")
    dtype, shape = np.dtype(header["dtype"].decode()), tuple(int(size) for size in header["shape"].split(b",") if size)
    if shape != (tokens - 1, layers, top_k):
        raise ValueError(
            f"routes of {row.name}: shape is {shape}, must be {(tokens - 1, layers, top_k)} "
            f"({tokens} tokens − 1, layers, top-k)"
        )
    size, announced = len(raw) - header.end(), dtype.itemsize * (tokens - 1) * layers * top_k
    if size != announced:
        raise ValueError(f"routes of {row.name}: {size} bytes of data, its header announces {announced}")
    array = np.ndarray(shape, dtype, raw, header.end(), order="F" if header["fortran"] == b"True" else "C")
    if array.max() >= experts:
        raise ValueError(f"routes of {row.name}: expert id {array.max()}, allowed are 0 … {experts - 1}")
    return array
