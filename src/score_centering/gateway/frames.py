"""Records of several rollouts in one HTTP body.

Little-endian: for each rollout the number of its turns (4 bytes), then for each turn its length in bytes (8 bytes) and
its wire form (`rollout.wire`, which carries version and checksum).
"""

import struct
from collections.abc import Iterator, Sequence

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def pack(rollouts: Sequence[Sequence[bytes]]) -> Iterator[bytes]:
    """The body, piece by piece."""
    for turns in rollouts:
        yield _COUNT.pack(len(turns))
        for payload in turns:
            yield _LENGTH.pack(len(payload))
            yield payload


def unpack(body: bytes, count: int) -> list[list[memoryview]]:
    """The turns' wire forms of `count` rollouts, as views of `body`.

    Raises:
        ValueError: a body that ends early or goes on after the last rollout.
    """
    view, offset = memoryview(body), 0

    def take(size: int) -> memoryview:
        nonlocal offset
        if offset + size > len(view):
            raise ValueError(f"records: {len(view)} bytes, {offset + size} were announced (is the body cut?)")
        offset += size
        return view[offset - size : offset]

    rollouts = []
    for _ in range(count):
        turns = _COUNT.unpack(take(_COUNT.size))[0]
        rollouts.append([take(_LENGTH.unpack(take(_LENGTH.size))[0]) for _ in range(turns)])
    if offset != len(view):
        raise ValueError(f"records: {len(view) - offset} bytes after the last rollout")
    return rollouts
