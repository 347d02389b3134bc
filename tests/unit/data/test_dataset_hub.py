"""The real hub client against a local server: pinned, verified, and every fault either mended or one clear line."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loading import load
from score_centering.data import load_manifest, read_split
from score_centering.data.hub import open_hub
from score_centering.settings import UserError

hub_server = load("unit/data/hub_server.py")
PINNED, MOVED, REPO = hub_server.PINNED, hub_server.MOVED, hub_server.REPO

FILE = "data/train-00000-of-00001.parquet"
PROGRAM = Path(__file__).parents[3] / "workflow/scripts/dataset.py"


def parquet(prompts):
    table = pa.table(
        {
            "prompt": list(prompts),
            "verification_info": [json.dumps({"ground_truth": str(index)}) for index, _ in enumerate(prompts)],
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    pinned = {
        FILE: parquet([f"pinned {index}" for index in range(8)]),
        "extra.jsonl": b'{"prompt": "small", "answer": "1"}\n',
        "README.md": b"about",
    }
    moved = {FILE: parquet(["moved"])}
    with hub_server.HubServer({PINNED: pinned, MOVED: moved, "main": moved}) as running:
        yield running


@pytest.fixture
def open_(server, tmp_path):
    def opened(revision=PINNED, repo=REPO, files=("data/*.parquet", "*.jsonl")):
        return open_hub(repo, revision, files, endpoint=server.url, cache_dir=tmp_path, retry_delays_s=(0.0, 0.0))

    return opened


def test_the_pinned_revision_is_fetched_and_a_moved_branch_is_ignored(server, open_):
    source = open_()
    assert [row.prompt for row in source.rows] == [*(f"pinned {index}" for index in range(8)), "small"]
    assert source.pin == {"kind": "hub", "repo": REPO, "revision": PINNED}
    assert source.files == {name: sha256(server.files[PINNED][name]) for name in (FILE, "extra.jsonl")}
    assert not [path for _, path in server.requests if MOVED in path or "main" in path or "README" in path]


def sha256(content):
    return hub_server.hashlib.sha256(content).hexdigest()


def test_a_second_preparation_downloads_nothing(server, open_):
    open_()
    server.requests.clear()
    open_()
    assert [method for method, path in server.requests if "/resolve/" in path] == []


@pytest.mark.parametrize(("path", "fault"), [("tree", 503), ("tree", 429), (FILE, 503), (FILE, 429), (FILE, "short")])
def test_a_passing_fault_is_tried_again(server, open_, path, fault, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.faults[path].append(fault)
    assert len(list(open_().rows)) == 9


def test_a_broken_transfer_that_stays_broken_is_one_line(server, open_, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.faults[FILE].extend([500] * 40)
    with pytest.raises(UserError, match=rf"{PINNED}: {FILE}: 3 attempts failed, the last with: .*500"):
        open_()


def test_a_hash_mismatch_is_fetched_again(server, open_):
    server.faults[FILE].append("flip")
    assert open_().files[FILE] == sha256(server.files[PINNED][FILE])
    assert [path.endswith(FILE) for method, path in server.requests if method == "GET"].count(True) == 2


@pytest.mark.parametrize("name", [FILE, "extra.jsonl"])
def test_a_hash_mismatch_that_stays_is_refused(server, open_, name):
    server.faults[name].extend(["flip", "flip"])
    with pytest.raises(UserError, match=rf"{name} has the hash \w+, the commit lists \w+; the transfer is corrupt"):
        open_()


def test_a_file_that_rots_in_the_cache_is_fetched_again(server, open_, tmp_path):
    open_()
    [blob] = [path for path in tmp_path.rglob("blobs/*") if path.read_bytes() == server.files[PINNED][FILE]]
    blob.write_bytes(b"rotten")
    assert open_().files[FILE] == sha256(server.files[PINNED][FILE])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repo": "owner/other"}, r"owner/other at a+: no such repository, or no access \(404"),
        ({"revision": "c" * 40}, r"at c+: no such revision \(404\)"),
        ({"files": ["test/*.parquet"]}, r"no \.parquet or \.jsonl file matches dataset\.hub\.files"),
    ],
)
def test_what_is_not_there_is_one_line(open_, change, message):
    with pytest.raises(UserError, match=message):
        open_(**change)


def test_a_file_that_vanishes_after_the_listing_is_one_line(server, open_):
    server.faults[FILE].append(404)
    with pytest.raises(UserError, match=rf"{FILE}: .*404"):
        open_()


def test_a_missing_token_is_one_line_and_the_token_is_used(server, open_, monkeypatch):
    server.token = "secret"
    with pytest.raises(UserError, match=r"no such repository, or no access \(401 Unauthorized\); set HF_TOKEN"):
        open_()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert len(list(open_().rows)) == 9


def test_a_server_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(UserError, match=r"2 attempts failed, the last with: "):
        open_hub(REPO, PINNED, ["*"], endpoint="http://127.0.0.1:9", cache_dir=tmp_path, retry_delays_s=(0.0,))


def test_the_program_prepares_a_hub_dataset_through_HF_ENDPOINT(server, tmp_path):
    """By hand, in a fresh process, with --val-size, --seed and --output-dir."""
    settings = {
        "dataset": {
            "source": "hub",
            "hub": {"repo": REPO, "revision": PINNED, "files": ["data/*.parquet", "*.jsonl"]},
            "val_size": 5,
        }
    }
    command = [sys.executable, str(PROGRAM), "--settings", json.dumps(settings), "--val-size", "2", "--seed", "7"]
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(tmp_path / "out/manifest.json")
    assert manifest.source == {"kind": "hub", "name": REPO, "repo": REPO, "revision": PINNED}
    assert manifest.split["seed"] == 7
    assert len(read_split(tmp_path / "out/manifest.json", "test")) == 2
    assert len(read_split(tmp_path / "out/manifest.json", "train")) == 7
