"""Disks that are full or read-only, limits, damaged tables: one clear line each, and no half file declared."""

import ctypes
import errno
import os
import resource
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.runs import PRODUCTS, open_run, schema
from score_centering.settings import UserError

CLONE_NEWNS, CLONE_NEWUSER, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 1, 32, 1 << 14, 1 << 18
NO_NAMESPACE = 99
PRODUCT_NAMES = sorted(PRODUCTS)


def one_line(ended) -> str:
    """The error line of a child that failed with a `UserError`; notices may stand before it."""
    assert ended.code == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and ended.stderr.splitlines()[-1] == errors[0]
    return errors[0]


def declared(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "state") if folder.exists() else []


def mount_small_disk(folder: Path, size: str) -> None:
    """In a child process: a private tmpfs of `size` at `folder`."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = CLONE_NEWNS | (0 if os.getuid() == 0 else CLONE_NEWUSER)
    options = f"size={size}".encode()
    if libc.unshare(spaces) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        os._exit(NO_NAMESPACE)
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, options):
        os._exit(NO_NAMESPACE)


def remount_read_only(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"none", bytes(folder), b"tmpfs", MS_REMOUNT | MS_RDONLY, None) == 0


def test_a_full_disk(tmp_path, fork, train):
    seen = tmp_path / "seen"
    disk = tmp_path / "disk"
    disk.mkdir()

    def child():
        mount_small_disk(disk, "256k")

        def fill(step, run):
            if step == 3:
                filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        os.write(filler, bytes(4096))

        try:
            train(disk / "run", on_step=fill)
        finally:
            seen.write_text(repr(declared(disk / "run")))
            os.unlink(disk / "filler")
            assert train(disk / "run") == 2

    ended = fork(child)
    if ended.code == NO_NAMESPACE:
        pytest.skip("this machine allows no private mounts")
    line = one_line(ended)
    assert "no space left on device; free some space and start the same command again" in line
    assert seen.read_text() == "[]"


def test_a_read_only_file_system(tmp_path, fork, train):
    def child():
        mount_small_disk(tmp_path, "1m")
        remount_read_only(tmp_path)
        train(tmp_path / "run")

    ended = fork(child)
    if ended.code == NO_NAMESPACE:
        pytest.skip("this machine allows no private mounts")
    assert "read-only file system; the results folder must be writable" in one_line(ended)


def test_a_folder_without_permission(fork, train):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)

        def child():
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            train(Path(folder) / "run")

        line = one_line(fork(child))
    assert f"cannot write {folder}/run/state: permission denied; the results folder must be writable" in line


@pytest.mark.parametrize("limit", [300, 1500, 3000])
def test_a_file_size_limit(tmp_path, fork, train, limit):
    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        train(tmp_path)

    line = one_line(fork(child))
    assert "file too large; raise the file-size limit" in line
    assert declared(tmp_path) == []
    assert train(tmp_path) in (0, 2, 4)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("when", [1, 3, 5, 8, 12, 14])
def test_a_write_that_fails_half_way(tmp_path, train, uninterrupted, monkeypatch, number, when):
    real, calls = os.write, []

    def failing(descriptor, content):
        calls.append(1)
        if len(calls) == when:
            real(descriptor, bytes(content)[: len(content) // 2])
            raise OSError(number, os.strerror(number))
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(UserError) as caught:
        train(tmp_path)
    assert os.strerror(number).lower() in str(caught.value) and "\n" not in str(caught.value)
    assert declared(tmp_path) in ([], PRODUCT_NAMES)
    monkeypatch.setattr(os, "write", real)
    train(tmp_path)
    assert (tmp_path / "metrics.parquet").read_bytes() == uninterrupted
    assert declared(tmp_path) == PRODUCT_NAMES


@pytest.mark.parametrize("blocker", ["a file", "a symbolic link"])
def test_something_else_in_place_of_the_state(tmp_path, train, blocker):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if blocker == "a file":
        (run_dir / "state").write_text("")
    else:
        (run_dir / "state").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"must lie inside|must be a folder"):
        train(run_dir)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["checkpoints", "damaged", "archive"])
def test_a_planted_folder_is_not_followed(tmp_path, train, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    state = tmp_path / "run" / "state"
    state.mkdir(parents=True)
    (state / name).symlink_to(elsewhere)
    with pytest.raises(UserError, match=rf"{name}: is a symbolic link; a run's state must lie inside its folder"):
        train(tmp_path / "run")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["lock", "steps.log", "phase"])
def test_a_planted_link_is_not_followed(tmp_path, train, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    state = tmp_path / "run" / "state"
    state.mkdir(parents=True)
    (state / name).symlink_to(victim)
    with pytest.raises(UserError, match="symbolic links are not followed"):
        train(tmp_path / "run")
    assert victim.read_text() == "precious"


def test_a_planted_link_under_a_temporary_name_is_not_followed(tmp_path, train):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".metrics.parquet.partial").symlink_to(victim)
    with pytest.raises(UserError, match="symbolic links are not followed"):
        train(run_dir)
    assert victim.read_text() == "precious"


@pytest.fixture
def published(tmp_path, identity):
    with open_run(tmp_path, identity()) as run:
        run.resume()
        for step in (1, 2, 3):
            run.record_step(step, {"loss": step / 7}, {"step_s": 1.0})
        run.publish("", {})
    return tmp_path / "metrics.parquet"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_table_is_one_line_or_still_well_formed(published, data):
    content = bytearray(published.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    broken = published.with_name("broken.parquet")
    broken.write_bytes(content)
    try:
        table = schema.read_metrics(broken)
    except UserError as error:
        assert str(error).startswith(f"{broken}: ") and "\n" not in str(error)
    else:
        assert table.schema.names == schema.METRICS.names


def write(path, table, **metadata):
    labels = {"experiment": "e", "arm": "a", "seed": "0", "schema_version": "2"} | metadata
    pq.write_table(table.replace_schema_metadata({k: v for k, v in labels.items() if v is not None}), path)


def rows(steps=(1, 2)):
    columns = {field.name: pa.nulls(len(steps), field.type) for field in schema.METRICS}
    return pa.table(columns | {"step": pa.array(steps, pa.int32())})


def of_another_type(name, values):
    return rows().set_column(schema.METRICS.get_field_index(name), name, pa.array(values))


@pytest.mark.parametrize(
    ("table", "metadata", "phrase"),
    [
        (rows().drop_columns("loss"), {}, "columns differ from schema version 2: loss"),
        (rows().append_column("extra", pa.array([1, 2])), {}, "columns differ from schema version 2: extra"),
        (rows().select(list(reversed(schema.METRICS.names))), {}, "their order"),
        (
            rows().set_column(schema.METRICS.get_field_index("loss"), "loss", pa.array(["a", "b"])),
            {},
            "column loss is string, must be double",
        ),
        (
            rows().set_column(schema.METRICS.get_field_index("step"), "step", pa.array([1, 2])),
            {},
            "column step is int64, must be int32",
        ),
        (rows((2, 2)), {}, "column step must rise"),
        (rows((1, None)), {}, "column step must rise"),
        (rows(), {"schema_version": "1"}, "schema version 1, this code reads 2"),
        (rows(), {"schema_version": None}, "schema version missing"),
        (rows(), {"arm": None}, "its metadata lacks 'arm'"),
    ],
)
def test_a_foreign_table_is_refused(tmp_path, table, metadata, phrase):
    path = tmp_path / "metrics.parquet"
    write(path, table, **metadata)
    with pytest.raises(UserError) as caught:
        schema.read_metrics(path)
    assert phrase in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_or_empty_table_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        schema.read_metrics(tmp_path / "metrics.parquet")
    (tmp_path / "metrics.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="not a readable parquet file"):
        schema.read_metrics(tmp_path / "metrics.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="no such file"):
        schema.read_timing(tmp_path / "folder")


def test_equal_rows_give_equal_bytes():
    metadata = {"experiment": "e", "arm": "a", "seed": "0"}
    assert schema.table_bytes(rows(), metadata) == schema.table_bytes(rows(), metadata)
    assert schema.table_bytes(rows(), metadata) != schema.table_bytes(rows((1, 3)), metadata)
