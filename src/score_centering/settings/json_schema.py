"""The configuration described: a JSON schema for Snakemake and editors, a table of keys for people."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from score_centering.settings.block import Block
from score_centering.settings.keys import inner_block, is_mapping
from score_centering.settings.model import Settings


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of `Settings`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def schema_text() -> str:
    """`json_schema` as it stands in `workflow/schemas/config.schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def key_table() -> str:
    """A Markdown table of every key, as it stands in `config/README.md`."""
    rows = [f"| `{key}` | {meaning} |" for key, meaning in _keys(Settings, "")]
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def _keys(block: type[Block], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in block.model_fields.items():
        inner = inner_block(field)
        if inner is None:
            yield prefix + name, _meaning(field)
        else:
            placeholder = f".<{name.removesuffix('s')}>" if is_mapping(field) else ""
            yield from _keys(inner, f"{prefix}{name}{placeholder}.")


def _meaning(field: FieldInfo) -> str:
    text = field.description
    if choices := _choices(field):
        text += f"; one of {', '.join(choices)}"
    if not field.is_required():
        text += f" (default `{json.dumps(field.get_default(call_default_factory=True))}`)"
    return text.replace("|", "\\|")


def _choices(field: FieldInfo) -> list[str]:
    """The allowed values of a key that takes one of several names."""
    members = [field.annotation, *get_args(field.annotation)]
    names = next((get_args(member) for member in members if get_origin(member) is Literal), ())
    return [f"`{name}`" for name in names if isinstance(name, str)] if len(names) > 1 else []


def main() -> None:
    """Write both into the checkout that is the working folder."""
    Path("workflow/schemas/config.schema.json").write_text(schema_text(), encoding="utf-8")
    readme = Path("config/README.md")
    head, heading, _ = readme.read_text(encoding="utf-8").partition("## Keys\n\n")
    readme.write_text(head + heading + key_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
