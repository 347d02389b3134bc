"""Configurations of any content: values drawn from the schema and beside it, and damaged text."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.settings import STAGES, UserError, load_settings, resolve, stage_json
from score_centering.settings.dotted import deep_merge
from score_centering.settings.json_schema import json_schema
from score_centering.settings.load import read_yaml

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "config/config.yaml"
CONFIG = yaml.safe_load(DEFAULT.read_text())
SCHEMA = json_schema()
NAMES = st.sampled_from(
    ["sc", "all", "a b", "it's", "ünï", "..", "../evil", "/etc", "a/../b", "-x", ".hidden", "a\n", "", "C:\\x"]
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    NAMES,
    st.sampled_from(
        ["${oc.env:HOME}", "${run}", "${experiment}", "${", "${oc.create:{a: 1}}", "__import__('os')", "1e400"]
    ),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def values(schema: dict[str, Any]) -> st.SearchStrategy:
    """Values that a JSON schema describes, with some that it does not."""
    return st.integers(0, 9).flatmap(lambda dice: JUNK if dice == 0 else described(schema))


def described(schema: dict[str, Any]) -> st.SearchStrategy:
    if "$ref" in schema:
        return described(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([described(one) for one in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return st.fixed_dictionaries({}, optional={key: values(one) for key, one in schema["properties"].items()})
        case "object":
            inner = schema.get("additionalProperties")
            return st.dictionaries(NAMES, values(inner) if isinstance(inner, dict) else JUNK, max_size=2)
        case "array":
            items = schema.get("items", {})
            return st.lists(values(items) if items else JUNK, max_size=3)
        case "string":
            return NAMES | st.text(max_size=5)
        case "integer":
            lowest = schema.get("minimum", schema.get("exclusiveMinimum", -3))
            return st.integers(lowest, lowest + 40)
        case "number":
            return st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 1)
        case "boolean":
            return st.booleans()
    return JUNK


def clean(error: UserError) -> None:
    assert str(error).strip() and "Traceback" not in str(error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_block_of_the_schema_resolves_or_is_refused(data):
    key = data.draw(st.sampled_from(sorted(SCHEMA["properties"])))
    overlay = {key: data.draw(values(SCHEMA["properties"][key]))}
    try:
        whole = resolve(deep_merge(CONFIG, overlay))
    except UserError as error:
        clean(error)
        return
    for arm in whole.run.arms:
        folder = Path("results") / whole.experiment / "runs" / arm
        assert len(folder.parts) == 4 and ".." not in folder.parts, "a name that leads out of results/"
    try:
        resolved = resolve(deep_merge(CONFIG, overlay), arm=data.draw(st.sampled_from(whole.run.arms)))
    except UserError as error:
        clean(error)
        return
    stage = data.draw(st.sampled_from(sorted(STAGES)))
    text = stage_json(resolved, stage)
    assert STAGES[stage].model_validate_json(text).to_json() == text


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_override_of_the_command_line_resolves_or_is_refused(data):
    key = data.draw(st.sampled_from(["experiment", "trainer.total_training_steps", "run.arms", "arms", "x.y", "", "."]))
    value = data.draw(
        st.text(max_size=12)
        | st.sampled_from(["&a [*a]", "2020-13-45", "[" * 3000, "9" * 5000, "!!python/name:os.system"])
    )
    try:
        resolve(CONFIG, [f"{key}={value}"])
    except UserError as error:
        clean(error)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_text_is_a_mapping_or_one_line(tmp_path, data):
    content = bytearray(DEFAULT.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "damaged.yaml"
    path.write_bytes(content)
    try:
        mapping = read_yaml(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    try:
        resolve(mapping)
    except UserError as error:
        clean(error)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"a: &a [*a]",
        b"a: &a {b: *a}",
        b"a: 2020-13-45",
        b"a: " + b"9" * 5000,
        b"a: " + b"[" * 2000,
        b"a: \x00",
        b"? {a: 1}\n: 2",
        b"!!python/object/apply:os.system [true]",
        b"a: !!python/name:os.system",
        b"--- 1\n--- 2",
    ],
)
def test_hostile_text_is_one_line(tmp_path, content):
    path = tmp_path / "it's – hostile.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_template_of_snakemake_s_is_no_template_here(tmp_path):
    marker = tmp_path / "ran"
    preset = {"__use_yte__": True, f"?__import__('pathlib').Path({str(marker)!r}).touch()": 1}
    (tmp_path / "preset.yaml").write_text(json.dumps(preset))
    with pytest.raises(UserError, match="unknown key"):
        load_settings([DEFAULT, tmp_path / "preset.yaml"])
    assert not marker.exists()
