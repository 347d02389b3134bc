"""The wire form of one rollout: binary, versioned, checksummed, and checked on arrival.

Little-endian, one record:

    header        magic, version, counts and widths (`_HEADER`)
    prompt_ids    (P,) int32
    token_ids     (R,) int32
    logprobs      (R,) float32, as sampled
    head          (R, K) uint16, the candidates' log-probs as codes of `rollout.candidates`
    routes        (P + R − 1, layers, top-k) uint8 or uint16, if recorded
    candidate ids (R, K), `id_bits` bits each, cut into planes
    crc32         of everything before, 4 bytes

`id_bits` is what the record's largest candidate id needs, at most ⌈log₂ V⌉. Its binary digits name the planes, widest
first: 18 bits are a plane of 16 bits a candidate (the ids' low ones) and a plane of 2, four candidates to a byte. At
K = 128 and V = 248,320 a generated token takes 552 bytes.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from score_centering.rollout.candidates import decode_logprobs, encode_logprobs
from score_centering.rollout.record import FINISH_REASONS, Rollout, check_shapes, validate

MAGIC = b"SCRR"
VERSION = 1
# magic, version, finish reason, id_bits, prompt and sample index, P, R, K, bytes of an expert id, layers, top-k
_HEADER = struct.Struct("<4sHBBqqIIIIII")
_CHECKSUM = struct.Struct("<I")
_ROUTE_DTYPES = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
_MAX_ID_BITS = 31


@dataclass(frozen=True)
class _Layout:
    """The counts and widths of a header, and where they put each section."""

    prompt: int
    rows: int
    candidates: int
    id_bits: int
    route_bytes: int
    layers: int
    top_k: int

    def sections(self) -> Iterator[tuple[np.dtype, tuple[int, ...]]]:
        """dtype and shape of each section between header and checksum, in order."""
        yield np.dtype("<i4"), (self.prompt,)
        yield np.dtype("<i4"), (self.rows,)
        yield np.dtype("<f4"), (self.rows,)
        yield np.dtype("<u2"), (self.rows, self.candidates)
        if self.route_bytes:
            yield _ROUTE_DTYPES[self.route_bytes], (self.prompt + self.rows - 1, self.layers, self.top_k)
        for width in plane_widths(self.id_bits):
            yield _plane_dtype(width), (-(-self.rows * self.candidates * width // (8 * _plane_dtype(width).itemsize)),)

    @property
    def nbytes(self) -> int:
        """Of the whole record."""
        sections = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.sections())
        return _HEADER.size + sections + _CHECKSUM.size


def encode(rollout: Rollout) -> bytes:
    """The wire form of a record; `decode` gives an equal one back.

    Candidates' log-probs are put on the 16-bit grid, where every engine's already lie.

    Raises:
        ValueError: arrays whose shapes or dtypes disagree, candidate ids or log-probs that no sampler returns.
    """
    check_shapes(rollout)
    head, planes, id_bits, candidates = np.zeros(0, np.uint16), [], 0, 0
    if rollout.candidate_ids is not None:
        candidates = rollout.candidate_ids.shape[1]
        head = encode_logprobs(rollout.candidate_logprobs)
        id_bits = _id_bits(rollout)
        planes = _to_planes(rollout.candidate_ids, id_bits)
    routes, layers, top_k = np.zeros(0, np.uint8), 0, 0
    if rollout.routes is not None:
        routes, (_, layers, top_k) = rollout.routes, rollout.routes.shape
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        FINISH_REASONS.index(rollout.finish_reason),
        id_bits,
        rollout.prompt_index,
        rollout.sample_index,
        len(rollout.prompt_ids),
        len(rollout.token_ids),
        candidates,
        0 if rollout.routes is None else routes.itemsize,
        layers,
        top_k,
    )
    arrays = [rollout.prompt_ids, rollout.token_ids, rollout.logprobs, head, routes, *planes]
    parts = [header, *(np.ascontiguousarray(array).data.cast("B") for array in arrays if array.size)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def decode(payload: bytes | bytearray | memoryview, vocab_size: int, top_logprobs: int | None = None) -> Rollout:
    """The record of a wire form, checked as every record is on arrival.

    Prompt and token ids, sampled log-probs and routes are views of `payload`, which must not change afterwards.

    Args:
        top_logprobs: K that was asked for (0: no candidates); None takes any.

    Raises:
        ValueError: a payload that is cut, changed, of another version or K, or whose record `validate` refuses.
    """
    data = memoryview(payload).cast("B")
    if len(data) < _HEADER.size + _CHECKSUM.size:
        raise ValueError(
            f"rollout payload: {len(data)} bytes, a record has at least {_HEADER.size + _CHECKSUM.size} (is it cut?)"
        )
    magic, version, finish, id_bits, prompt_index, sample_index, *counts = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"rollout payload: begins with {magic!r}, a record begins with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"rollout payload: version {version}, this program reads version {VERSION}")
    prompt, rows, candidates, *routes = counts
    layout = _Layout(prompt, rows, candidates, id_bits, *routes)
    _check_layout(layout, finish)
    if len(data) != layout.nbytes:
        raise ValueError(f"rollout payload: {len(data)} bytes, its header announces {layout.nbytes}")
    if zlib.crc32(data[: -_CHECKSUM.size]) != _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0]:
        raise ValueError("rollout payload: its checksum does not match, it was changed on the way")
    if top_logprobs is not None and candidates != top_logprobs:
        raise ValueError(f"rollout payload: {candidates} candidates a position, {top_logprobs} were asked for")
    prompt_ids, token_ids, logprobs, head, *rest = _views(data, layout)
    rollout = Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        candidate_ids=_from_planes(rest[bool(layout.route_bytes) :], id_bits, head.shape) if candidates else None,
        candidate_logprobs=decode_logprobs(head) if candidates else None,
        finish_reason=FINISH_REASONS[finish],
        routes=rest[0] if layout.route_bytes else None,
    )
    validate(rollout, vocab_size)
    return rollout


def plane_widths(bits: int) -> list[int]:
    """The binary digits of `bits`, widest first: 18 → [16, 2]."""
    return [width for width in (16, 8, 4, 2, 1) if bits & width]


def _plane_dtype(width: int) -> np.dtype:
    return np.dtype("<u2") if width == 16 else np.dtype(np.uint8)


def _id_bits(rollout: Rollout) -> int:
    low, high = int(rollout.candidate_ids.min()), int(rollout.candidate_ids.max())
    if low < 0:
        raise ValueError(
            f"rollout (prompt {rollout.prompt_index}, sample {rollout.sample_index}): a candidate id is {low}"
        )
    return max(1, high.bit_length())


def _to_planes(ids: np.ndarray, bits: int) -> list[np.ndarray]:
    """ids (…) int32 of at most `bits` bits → the planes, low bits first; a plane's last byte is filled with zeros."""
    planes, left = [], ids.ravel()
    for width in plane_widths(bits):
        dtype = _plane_dtype(width)
        part = left.astype(dtype)  # keeps the low bits
        left = left >> width
        if width < 8:
            part = np.pad(part, (0, -len(part) % (8 // width))) & np.uint8((1 << width) - 1)
            part = np.bitwise_or.reduce(part.reshape(-1, 8 // width) << _shifts(width), axis=1, dtype=np.uint8)
        planes.append(part)
    return planes


def _from_planes(planes: list[np.ndarray], bits: int, shape: tuple[int, int]) -> np.ndarray:
    """The inverse of `_to_planes`: ids (R, K) int32."""
    ids, shift = np.zeros(math.prod(shape), np.int32), 0
    for width, plane in zip(plane_widths(bits), planes, strict=True):
        if width < 8:
            plane = ((plane[:, None] >> _shifts(width)) & np.uint8((1 << width) - 1)).ravel()[: len(ids)]
        ids |= plane.astype(np.int32) << shift
        shift += width
    return ids.reshape(shape)


def _shifts(width: int) -> np.ndarray:
    return np.arange(0, 8, width, dtype=np.uint8)


def _check_layout(layout: _Layout, finish: int) -> None:
    """Refuses headers that no encoder writes, before they size anything."""
    has_routes = layout.route_bytes in _ROUTE_DTYPES and layout.top_k > 0 and layout.layers > 0
    sound = {
        "finish reason": finish < len(FINISH_REASONS),
        "number of tokens": layout.rows > 0 and layout.prompt > 0,
        "width of candidate ids": bool(layout.candidates) <= layout.id_bits <= _MAX_ID_BITS * bool(layout.candidates),
        "shape of routes": has_routes or not (layout.route_bytes or layout.top_k or layout.layers),
    }
    for what, holds in sound.items():
        if not holds:
            raise ValueError(f"rollout payload: impossible {what} in its header")


def _views(data: memoryview, layout: _Layout) -> list[np.ndarray]:
    """The sections as arrays over `data`."""
    views, offset = [], _HEADER.size
    for dtype, shape in layout.sections():
        view = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
        views.append(view)
        offset += view.nbytes
    return views
