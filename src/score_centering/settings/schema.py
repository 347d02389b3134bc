"""The JSON schema of a configuration, for Snakemake's `validate` and for editors."""

import json
from typing import Any

from score_centering.settings.model import Settings


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of `Settings`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def schema_text() -> str:
    """`json_schema` as it stands in `workflow/schemas/config.schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
