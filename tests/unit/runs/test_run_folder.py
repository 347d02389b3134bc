"""Resume, identity, one owner, publishing: what a run folder promises."""

import json
import os
import shutil
from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.runs import checkpoint, open_run, schema
from score_centering.runs.folder import read_phase
from score_centering.runs.log import decode, encode, read_log
from score_centering.settings import UserError

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def stop_after(step):
    def on_step(now, run):
        if now > step:
            raise SystemExit(9)

    return on_step


@pytest.fixture
def interrupted(tmp_path, fork, train):
    """A run that died in step 5, with checkpoints of steps 2 and 4 and four recorded steps."""
    assert fork(lambda: train(tmp_path, on_step=stop_after(4))).code == 9
    return tmp_path


def test_resumes_after_the_last_checkpoint(interrupted, train, uninterrupted):
    assert [path.name for path in checkpoint.paths(interrupted / "state" / "checkpoints")] == [
        "step000004",
        "step000002",
    ]
    assert train(interrupted) == 4
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


def test_drops_log_entries_after_the_checkpoint_and_a_torn_line(interrupted, train, uninterrupted):
    log = interrupted / "state" / "steps.log"
    with log.open("ab") as file:
        file.write(encode(5, {"loss": 99.0}, {}) + b'0badc0de {"step"')
    assert len(read_log(log)) == 5
    assert train(interrupted) == 4
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


def test_a_finished_state_that_was_not_declared_is_only_published(tmp_path, train, uninterrupted):
    train(tmp_path)
    for name in ("metrics.parquet", "timing.parquet", "run.json", "state/PUBLISHED"):
        (tmp_path / name).unlink()
    assert train(tmp_path) == 5
    assert (tmp_path / "metrics.parquet").read_bytes() == uninterrupted


def test_a_forced_rerun_trains_afresh_and_keeps_the_old_state(tmp_path, train, uninterrupted, capfd):
    train(tmp_path)
    assert train(tmp_path) == 0
    assert train(tmp_path) == 0
    assert "training starts afresh" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "state" / "archive").iterdir()) == ["0001", "0002"]
    assert len(read_log(tmp_path / "state" / "archive" / "0001" / "steps.log")) == 5
    assert (tmp_path / "metrics.parquet").read_bytes() == uninterrupted


def test_a_removed_archive_is_no_obstacle(tmp_path, train):
    for _ in range(3):
        train(tmp_path)
    shutil.rmtree(tmp_path / "state" / "archive" / "0001")
    train(tmp_path)
    assert sorted(os.listdir(tmp_path / "state" / "archive")) == ["0002", "0003"]


def damage(kind, folder):
    path = folder / "state" / "checkpoints" / "step000004"
    match kind:
        case "truncated tensors":
            with (path / checkpoint.TENSORS).open("r+b") as file:
                file.truncate(100)
        case "bit flip in tensors":
            content = bytearray((path / checkpoint.TENSORS).read_bytes())
            content[-3] ^= 4
            (path / checkpoint.TENSORS).write_bytes(content)
        case "no tensors":
            (path / checkpoint.TENSORS).unlink()
        case "no manifest":
            (path / checkpoint.MANIFEST).unlink()
        case "truncated manifest":
            os.truncate(path / checkpoint.MANIFEST, 200)
        case "changed manifest":
            manifest = json.loads((path / checkpoint.MANIFEST).read_text())
            manifest["scalars"]["order"].pop()
            (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        case "manifest that is a list":
            (path / checkpoint.MANIFEST).write_text("[1]")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncated tensors", "does not have the sha256"),
        ("bit flip in tensors", "does not have the sha256"),
        ("no tensors", "tensors.safetensors is missing"),
        ("no manifest", "checkpoint.json is missing"),
        ("truncated manifest", "checkpoint.json is missing or unreadable"),
        ("changed manifest", "was changed after it was written"),
        ("manifest that is a list", "checkpoint.json is missing or unreadable"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    interrupted, train, uninterrupted, capfd, kind, reason
):
    damage(kind, interrupted)
    assert train(interrupted) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "step000004: not resumed from" in lines[0] and reason in lines[0]
    assert (interrupted / "state" / "damaged" / "step000004-1").is_dir()
    assert checkpoint.next_number(interrupted / "state" / "damaged", "step000004-") == 2
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


def test_without_a_usable_checkpoint_training_starts_at_the_beginning(interrupted, train, uninterrupted, capfd):
    for path in checkpoint.paths(interrupted / "state" / "checkpoints"):
        (path / checkpoint.MANIFEST).write_bytes(b"")
    assert train(interrupted) == 0
    assert "no checkpoint is usable; training starts at the beginning" in capfd.readouterr().err
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


@pytest.mark.parametrize(("line", "expected"), [(0, 0), (2, 2)])
def test_a_changed_metrics_log_is_noticed(interrupted, train, uninterrupted, line, expected):
    log = interrupted / "state" / "steps.log"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"loss": ', b'"loss": 1')
    log.write_bytes(b"".join(lines))
    assert train(interrupted) == expected
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_or_missing_byte_of_a_checkpoint_is_noticed(tmp_path, data):
    path = tmp_path / "step000003"
    shutil.rmtree(path, ignore_errors=True)
    checkpoint.write(tmp_path, checkpoint.Checkpoint(3, {"w": torch.arange(6.0)}, {"x": [1, None]}, 7, "0" * 64))
    name = data.draw(st.sampled_from([checkpoint.TENSORS, checkpoint.MANIFEST]))
    content = bytearray((path / name).read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[position:]
    (path / name).write_bytes(content)
    try:
        good = checkpoint.read(path)
    except checkpoint.DamagedError:
        return
    assert name == checkpoint.MANIFEST  # white space of the JSON text may change; what it says may not
    assert (good.step, good.scalars, good.log_bytes) == (3, {"x": [1, None]}, 7)
    assert torch.equal(good.tensors["w"], torch.arange(6.0))


def test_only_the_two_newest_checkpoints_are_kept(tmp_path, train):
    train(tmp_path, steps=6, save_freq=1)
    assert sorted(os.listdir(tmp_path / "state" / "checkpoints")) == ["step000005", "step000006"]


def test_checkpoint_keeps_every_dtype_and_value(tmp_path):
    tensors = {
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "int8": torch.tensor([[-128, 127]], dtype=torch.int8),
        "f64": torch.tensor(0.1, dtype=torch.float64),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.zeros(0, 3),
    }
    scalars = {"big": 1 << 127, "third": 1 / 3, "text": "é\n", "none": None}
    checkpoint.write(tmp_path, checkpoint.Checkpoint(1, tensors, scalars, 0, "0" * 64))
    read = checkpoint.read(tmp_path / "step000001")
    assert read.scalars == scalars
    for name, tensor in tensors.items():
        assert torch.equal(read.tensors[name].nan_to_num(7), tensor.nan_to_num(7)), name
        assert read.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("scalars", [{"x": float("nan")}, {"x": (1, 2)}, {1: 2}, {"x": object()}, {"x": {1, 2}}])
def test_scalars_that_json_would_change_are_refused(tmp_path, scalars):
    with pytest.raises(ValueError, match="checkpoint scalars must"):
        checkpoint.write(tmp_path, checkpoint.Checkpoint(1, {}, scalars, 0, ""))


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"config": {"trainer": {"lr": 0.2}}}, "config.trainer.lr: 0.1 there, 0.2 here"),
        ({"config": {"trainer": {"lr": 0.1, "eps": 1}}}, "config.trainer.eps: null there, 1 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"arm": "grpo"}, 'arm: "sc" there, "grpo" here'),
        ({"trainer_revision": 2}, "trainer_revision: 1 there, 2 here"),
        ({"device": "NVIDIA H200"}, 'device: "cpu" there, "NVIDIA H200" here'),
    ],
)
def test_another_identity_never_resumes(interrupted, train, uninterrupted, changes, phrase):
    before = sorted(interrupted.rglob("*"))
    with pytest.raises(UserError, match="holds an unfinished run of another identity") as caught:
        train(interrupted, **changes)
    message = str(caught.value)
    assert phrase in message and "mv " in message and "\n" not in message
    assert sorted(interrupted.rglob("*")) == before
    assert train(interrupted) == 4
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


@pytest.mark.parametrize("field", ["dataset_manifest", "model_manifest", "quantised_config"])
def test_changed_inputs_never_resume(tmp_path, fork, train, field):
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    run_dir = tmp_path / "run"
    assert fork(lambda: train(run_dir, on_step=stop_after(4), **{field: manifest})).code == 9
    manifest.write_text("{ }")
    with pytest.raises(UserError, match=f"{field}_sha256: "):
        train(run_dir, **{field: manifest})


def test_a_missing_manifest_is_one_line(tmp_path, identity):
    with pytest.raises(UserError, match=r"absent\.json: cannot read this input of the run: no such file"):
        identity(dataset_manifest=tmp_path / "absent.json")


def test_changed_code_goes_on_and_is_recorded(interrupted, train, uninterrupted, monkeypatch, capfd):
    old = json.loads((interrupted / "state" / "identity.json").read_text())["package_sha256"]
    monkeypatch.setattr("score_centering.runs.identity.package_digest", lambda: "f" * 64)
    assert train(interrupted) == 4
    assert "the code changed since its checkpoint" in capfd.readouterr().err
    kept = json.loads((interrupted / "run.json").read_text())["identity"]
    assert (kept["package_sha256"], kept["earlier_package_sha256"]) == ("f" * 64, [old])
    assert (interrupted / "metrics.parquet").read_bytes() == uninterrupted


@pytest.mark.parametrize("content", [None, "", "[1]", "{}", '{"experiment": "tiny"}'])
def test_state_whose_identity_is_lost_is_refused(interrupted, train, content):
    path = interrupted / "state" / "identity.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r"identity\.json: .*; put it aside to train anew: mv ") as error:
        train(interrupted)
    assert "\n" not in str(error.value)


def test_steps_follow_each_other(tmp_path, identity):
    with open_run(tmp_path, identity()) as run:
        with pytest.raises(RuntimeError, match="call resume"):
            run.record_step(1, {}, {})
        assert run.resume() is None
        run.record_step(1, {}, {})
        with pytest.raises(ValueError, match="step 3 does not follow step 1"):
            run.record_step(3, {}, {})
        with pytest.raises(ValueError, match="checkpoint of step 3, but step 1"):
            run.save_checkpoint(3, {}, {})


@pytest.mark.parametrize(
    ("metrics", "timing", "phrase"),
    [
        ({"loss": float("nan")}, {}, "step 1: loss = nan: not finite"),
        ({"grad_norm": float("inf")}, {}, "step 1: grad_norm = inf: not finite"),
        ({"reward_mean": float("-inf")}, {}, "step 1: reward_mean = -inf: not finite"),
        ({"los": 1.0}, {}, "step 1: unknown column los"),
        ({"step": 1}, {}, "step 1: unknown column step"),
        ({"loss": "1"}, {}, "step 1: loss = '1': must be a number"),
        ({"loss": [1.0]}, {}, "step 1: loss = [1.0]: must be a number"),
        ({"loss": True}, {}, "step 1: loss = True: must be a number"),
        ({"generated_tokens": 1.0}, {}, "step 1: generated_tokens = 1.0: must be a whole number"),
        ({"generated_tokens": 1 << 63}, {}, "does not fit int64"),
        ({}, {"step_s": -0.1}, "step 1: step_s = -0.1: a duration can't be negative"),
        ({}, {"started_at": datetime(2026, 1, 1)}, "must be a datetime with its time zone"),
        ({}, {"started_at": 1.0}, "must be a datetime with its time zone"),
    ],
)
def test_a_bad_value_is_one_line_and_writes_nothing(tmp_path, identity, metrics, timing, phrase):
    with open_run(tmp_path, identity()) as run:
        run.resume()
        with pytest.raises(UserError) as caught:
            run.record_step(1, metrics, timing)
        assert phrase in str(caught.value) and "\n" not in str(caught.value)
        assert run.records() == []
        run.record_step(1, {"loss": 0.5}, {})


def test_numbers_of_numpy_and_torch_are_taken(tmp_path, identity):
    import numpy as np

    with open_run(tmp_path, identity()) as run:
        run.resume()
        metrics = {"loss": torch.tensor(0.5), "k3_kl": np.float32(0.25), "generated_tokens": np.int64(7)}
        run.record_step(1, metrics, {"started_at": NOW, "peak_rss_bytes": np.int32(3)})
        run.publish("", {})
    row = schema.read_metrics(tmp_path / "metrics.parquet").to_pylist()[0]
    assert (row["loss"], row["k3_kl"], row["generated_tokens"], row["entropy"]) == (0.5, 0.25, 7, None)
    assert schema.read_timing(tmp_path / "timing.parquet").to_pylist()[0]["started_at"] == NOW


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_the_log_keeps_every_float64_exactly(value):
    record = decode(encode(1, {"loss": value}, {})[:-1])
    assert record["metrics"]["loss"] == value
    assert str(record["metrics"]["loss"]) == str(value)


def test_published_files_carry_their_names(tmp_path, train):
    train(tmp_path)
    metadata = pq.read_schema(tmp_path / "metrics.parquet").metadata
    assert metadata == {b"experiment": b"tiny", b"arm": b"sc", b"seed": b"0", b"schema_version": b"2"}
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["steps"] == 5 and run["identity"]["arm"] == "sc"
    assert (tmp_path / "config.yaml").read_text() == "trainer:\n  lr: 0.1\n"


def test_a_smoke_run_declares_run_json_only(tmp_path, identity):
    with open_run(tmp_path, identity(), publish=["run.json"]) as run:
        run.resume()
        run.record_step(1, {"loss": 0.5}, {})
        run.publish("", {"rows": [record["metrics"]["loss"] for record in run.records()]})
    assert sorted(os.listdir(tmp_path)) == ["run.json", "state"]
    with pytest.raises(ValueError, match="choose from"), open_run(tmp_path, identity(), publish=["x.txt"]):
        pass


def test_nothing_recorded_is_nothing_published(tmp_path, identity):
    with open_run(tmp_path, identity()) as run:
        run.resume()
        with pytest.raises(ValueError, match="nothing to publish"):
            run.publish("", {})
    assert os.listdir(tmp_path) == ["state"]


def test_phase_is_readable_while_it_runs(tmp_path, identity):
    assert read_phase(tmp_path) is None
    with open_run(tmp_path, identity()) as run:
        run.resume()
        run.phase("rollout")
        assert read_phase(tmp_path).name == "rollout" and read_phase(tmp_path).step is None
        run.record_step(1, {}, {})
        assert read_phase(tmp_path).name == "metrics"
        run.phase("rollout")
        assert read_phase(tmp_path).step == 1
        with pytest.raises(ValueError, match="choose from start, rollout"):
            run.phase("lunch")


@pytest.mark.parametrize("bad", range(4))
def test_a_log_is_read_up_to_its_first_damaged_line(tmp_path, bad):
    """What follows may look whole, but it belongs to a run that the damage cut off."""
    lines = [encode(step, {"loss": step / 2}, {}) for step in range(4)]
    lines[bad] = lines[bad].replace(b'"loss": ', b'"loss": 1')
    (tmp_path / "steps.log").write_bytes(b"".join(lines))
    assert [record["step"] for record in read_log(tmp_path / "steps.log")] == list(range(bad))
