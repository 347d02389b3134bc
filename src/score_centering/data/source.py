"""Where problems come from. A source is rows plus the pin that names exactly these rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from score_centering.data.problems import RawProblem
from score_centering.data.tables import AS_NAMED, Reading


@dataclass(frozen=True)
class Source:
    """Rows of one pinned source.

    `pin` goes into the manifest and says how to get the same rows again; `files` maps each source file to its sha256.
    """

    name: str
    rows: Iterable[RawProblem]
    pin: dict[str, Any]
    files: dict[str, str]


def open_source(kind: str, block: dict[str, Any], seed: int, reading: Reading = AS_NAMED) -> Source:
    """The source of the `dataset` block: `kind` is reasoning_gym, sums, hub or local, `block` its settings by name.

    `seed` generates the problems of reasoning_gym and sums; the other sources do not use it.
    `reading` says where the rows of hub and local files hold problem and answer; generated problems do not use it.
    """
    match kind:
        case "reasoning_gym":
            from score_centering.data.generated import open_reasoning_gym

            return open_reasoning_gym(**block, seed=seed)
        case "sums":
            from score_centering.data.sums import open_sums

            return open_sums(**block, seed=seed)
        case "hub":
            from score_centering.data.hub import open_hub

            return open_hub(**block, reading=reading)
        case "local":
            from score_centering.data.local_files import open_local

            return open_local(**block, reading=reading)
    raise ValueError(f"dataset.source: {kind!r} is none of reasoning_gym, sums, hub, local")
