"""The keys of the typed configuration: which block holds which, and what an unknown one may have meant."""

import difflib
from collections.abc import Iterator, Sequence
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from score_centering.settings.block import Block


def inner_block(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, optional ones and mappings of blocks included."""
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, Block):
            return annotation
        pending.extend(get_args(annotation))
    return None


def is_mapping(field: FieldInfo) -> bool:
    """Whether a field maps names of the user's to blocks or values."""
    return get_origin(field.annotation) is dict


def did_you_mean(model: type[Block], place: Sequence[str | int]) -> str:
    """`; did you mean …?` for the unknown key at `place` of `model`: a key of the same block that is spelled alike,
    else a key of that name elsewhere; empty where there is none."""
    *path, unknown = map(str, place)
    block, prefix = _block_at(model, path), "".join(f"{part}." for part in path)
    near = difflib.get_close_matches(unknown, block.model_fields, n=1) if block is not None else []
    meant = [prefix + near[0]] if near else [key for key in _keys(model, "") if key.rpartition(".")[2] == unknown][:3]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _block_at(model: type[Block], path: Sequence[str]) -> type[Block] | None:
    """The block that holds the keys at `path`; names in mappings are the user's."""
    block: type[Block] | None = model
    named = False
    for part in path:
        if named:
            named = False
            continue
        field = block.model_fields.get(part) if block is not None else None
        if field is None:
            return None
        block, named = inner_block(field), is_mapping(field)
    return None if named else block


def _keys(block: type[Block], prefix: str) -> Iterator[str]:
    """Dotted keys of a block, those inside of mappings left out."""
    for name, field in block.model_fields.items():
        yield prefix + name
        inner = inner_block(field)
        if inner is not None and not is_mapping(field):
            yield from _keys(inner, f"{prefix}{name}.")
