"""Files of other stages: digests, JSON objects, manifests, and what is refused of them."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.settings import UserError
from score_centering.settings.inputs import read_json, read_manifest, sha256_file


@dataclass(frozen=True)
class Note:
    schema_version: int
    files: dict[str, dict[str, str]]
    text: str | None


GOOD = {"schema_version": 3, "files": {"a": {"sha256": "0"}}, "text": None}


def test_a_digest_is_that_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
    ],
)
def test_what_is_no_json_object_is_one_line(tmp_path, content, message):
    path = tmp_path / "note.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_folder_is_no_json_object(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        read_json(tmp_path)


def test_a_manifest_comes_back_typed(tmp_path):
    (tmp_path / "note.json").write_text(json.dumps(GOOD))
    assert read_manifest(tmp_path / "note.json", Note, 3, "note") == Note(**GOOD)
    with pytest.raises(UserError, match="no note manifest of schema version 4; prepare the note again"):
        read_manifest(tmp_path / "note.json", Note, 4, "note")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(JSON, st.builds(lambda key, value: {**GOOD, key: value}, st.sampled_from(list(GOOD)), JSON)))
def test_any_json_is_a_manifest_or_one_line(tmp_path, content):
    path = tmp_path / "note.json"
    path.write_text(json.dumps(content))
    try:
        note = read_manifest(path, Note, 3, "note")
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert all(isinstance(value, dict) for value in note.files.values())
