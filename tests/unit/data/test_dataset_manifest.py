"""A manifest that no longer matches its files stops everything that reads it, and names the file."""

import json

import pytest

from score_centering.data import RawProblem, Source, load_manifest, prepare, read_split, write_dataset
from score_centering.settings import UserError


@pytest.fixture
def folder(tmp_path):
    rows = [RawProblem(f"What is {index}?", str(index)) for index in range(10)]
    source = Source("test", rows, {"kind": "test", "revision": "abc"}, {"a.jsonl": "0" * 64})
    result = prepare(source, val_size=3, seed=42, parsable=lambda answers: [True] * len(answers))
    write_dataset(result, source, tmp_path, {"seed": 42, "val_size": 3})
    return tmp_path


def test_the_manifest_names_pin_hashes_counts_and_versions(folder):
    content = json.loads((folder / "manifest.json").read_text())
    assert content["source"] == {"kind": "test", "name": "test", "revision": "abc"}
    assert content["source_files"] == {"a.jsonl": "0" * 64}
    assert {name: file["rows"] for name, file in content["files"].items()} == {"test.parquet": 3, "train.parquet": 7}
    assert all(len(file["sha256"]) == 64 for file in content["files"].values())
    assert content["split"] == {"seed": 42, "val_size": 3}
    assert set(content["versions"]) == {"pyarrow", "python"}
    assert load_manifest(folder / "manifest.json").rows_read == 10


def test_both_splits_are_read_back_in_file_order(folder):
    train, test = (read_split(folder / "manifest.json", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (7, 3)
    assert {problem.answer for problem in train + test} == {str(index) for index in range(10)}
    assert {problem.source for problem in train} == {"test"}


def test_an_unknown_split_is_refused(folder):
    with pytest.raises(ValueError, match="'validation' is none of train, test"):
        read_split(folder / "manifest.json", "validation")


@pytest.mark.parametrize("name", ["train.parquet", "test.parquet"])
def test_a_changed_file_is_named(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: sha256 [0-9a-f]{{64}} is not the"):
        read_split(folder / "manifest.json", "train")


def test_a_missing_file_is_named(folder):
    (folder / "test.parquet").unlink()
    with pytest.raises(UserError, match=r"test\.parquet: missing"):
        load_manifest(folder / "manifest.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"schema_version": 2}', "no dataset manifest of schema version 1"),
        ('{"schema_version": 1}', "no dataset manifest of schema version 1"),
    ],
)
def test_what_is_no_manifest_is_refused(folder, text, message):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_manifest(folder / "manifest.json")


def test_a_manifest_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json: No such file"):
        load_manifest(tmp_path / "manifest.json")


def test_a_failed_write_leaves_the_old_manifest_refusing_the_new_files(folder):
    """The manifest is written last: files without it never pass for a prepared dataset."""
    (folder / "train.parquet").write_bytes((folder / "test.parquet").read_bytes())
    with pytest.raises(UserError, match=r"train\.parquet"):
        load_manifest(folder / "manifest.json")
