"""Loggers: names for every column, each step sent once over all starts of a run, nothing else touched."""

import json
import random
import re
import struct
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from score_centering.runs import schema
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training import loggers

COLUMNS = {*schema.METRICS.names, *schema.TIMING.names}
STARTED = datetime(2026, 11, 29, 12, 0, 0, 500_000, tzinfo=UTC)
TIMING = {"rollout_s": 1.5, "step_s": 2.0, "tokens_per_s": 80.0, "peak_rss_bytes": 1 << 30, "started_at": STARTED}


def metrics_of(step: int) -> dict:
    return {"reward_mean": step / 8, "k3_kl": 2.0**-step, "generated_tokens": 100 + step, "val_reward_mean": None}


def stage_with(*chosen: str) -> TrainStage:
    return TrainStage.of(load_settings(overrides=[f"trainer.logger=[{','.join(chosen)}]"], arm="sc"))


def show_steps(stage: TrainStage, state, steps) -> None:
    """One start of a run: what the trainer does around and after `record_step`."""
    state.mkdir(exist_ok=True)
    with loggers.showing(stage, "sc", 0, steps[0], SimpleNamespace(state=state)) as show:
        for step in steps:
            show(step, metrics_of(step), TIMING)


@pytest.fixture
def recorded(monkeypatch):
    """A logger in the place of wandb that keeps what it is told and given."""
    calls = SimpleNamespace(about=[], sent=[])

    @contextmanager
    def start(about):
        calls.about.append(about)
        yield lambda step, values: calls.sent.append((step, values))

    monkeypatch.setitem(loggers.STARTS, "wandb", start)
    return calls


def test_every_column_has_one_name_and_no_name_is_used_twice():
    assert set(loggers.NAMES) == COLUMNS
    assert len(set(loggers.NAMES.values())) == len(COLUMNS)
    assert not set(loggers.VERL_NAMES) & set(loggers.OWN_NAMES)


def test_measured_values_of_a_step_by_name():
    assert loggers.named(3, metrics_of(3), TIMING) == {
        "training/global_step": 3,
        "critic/rewards/mean": 0.375,
        "rollout_corr/k3_kl": 0.125,
        "response_length/sum": 103,
        "timing_s/gen": 1.5,
        "timing_s/step": 2.0,
        "perf/throughput": 80.0,
        "perf/peak_rss_bytes": 1 << 30,
        "training/started_at": STARTED.timestamp(),
    }


def test_verl_writes_the_names_called_its_own():
    try:
        verl = distribution("verl")
    except PackageNotFoundError:
        pytest.skip("verl is not installed (requirements/test.lock has it)")
    text = "".join(
        path.locate().read_text(encoding="utf-8")
        for path in verl.files
        if re.match(r"verl/(trainer/ppo|workers/(utils|engine)|utils)/[^/]*\.py$|verl/workers/[^/]*\.py$", str(path))
    )
    computed = {"val-core/test/reward/mean@1"}  # its name is put together of data source, variable and statistic
    lost = [name for name in loggers.VERL_NAMES.values() if not re.search(rf'["/]{name.rpartition("/")[2]}"', text)]
    assert set(lost) <= computed


def test_a_step_is_sent_once_over_all_starts(recorded, tmp_path):
    stage = stage_with("wandb")
    show_steps(stage, tmp_path, [0, 1, 2, 3])
    show_steps(stage, tmp_path, [2, 3, 4])  # resumed from the checkpoint of step 1
    assert [step for step, _ in recorded.sent] == [0, 1, 2, 3, 4]
    first, second = recorded.about
    assert first == second
    assert (first.project, first.name, first.run_id) == ("score-centering-tiny", "sc-seed0", "tiny-sc-seed0")


def test_a_run_trained_anew_is_another_run(recorded, tmp_path):
    (tmp_path / "archive/0001").mkdir(parents=True)
    show_steps(stage_with("wandb"), tmp_path, [0])
    assert recorded.about[0].run_id == "tiny-sc-seed0-2"


def test_the_console_is_one_of_the_loggers(recorded, tmp_path, capsys):
    stage = stage_with("console")
    show_steps(stage, tmp_path, [1])
    assert f"sc  step 1/{stage.trainer.total_training_steps}  reward 0.125" in capsys.readouterr().err
    assert recorded.about == []
    assert list(tmp_path.iterdir()) == []
    show_steps(stage_with("wandb"), tmp_path, [1])
    show_steps(stage_with(), tmp_path, [1])
    assert capsys.readouterr().err == ""


def test_a_logger_that_is_missing_is_one_line(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(loggers, "version", absent)
    loggers.check(["console"], smoke=False)
    with pytest.raises(UserError, match=r"^trainer\.logger: trackio is not installed; pip install trackio, or leave"):
        loggers.check(["console", "trackio"], smoke=False)


def test_a_smoke_run_is_shown_on_the_console_only():
    with pytest.raises(UserError, match=r"^trainer\.logger: wandb: a smoke run is shown on the console only$"):
        loggers.check(["wandb"], smoke=True)
    smoke = load_settings(overrides=[], arm="sc", smoke=True)
    loggers.check(smoke.trainer.logger, smoke=True)


def test_loggers_are_no_part_of_the_identity():
    assert stage_with("console", "wandb", "trackio").identity() == stage_with("console").identity()


def generators() -> tuple:
    return random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist()


def test_wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed (requirements/test.lock has it)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    stage, before = stage_with("wandb"), generators()
    show_steps(stage, tmp_path, [0, 1, 2])
    show_steps(stage, tmp_path, [1, 2, 3])
    assert generators() == before
    files = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    runs = sorted((wandb_records(path) for path in files), key=lambda run: run[1][0]["_step"])
    assert [run.run_id for run, _ in runs] == ["tiny-sc-seed0"] * 2
    assert [(run.project, run.display_name) for run, _ in runs] == [("score-centering-tiny", "sc-seed0")] * 2
    assert [row["_step"] for _, rows in runs for row in rows] == [0, 1, 2, 3]
    for _, rows in runs:
        for row in rows:
            own = {key: value for key, value in row.items() if not key.startswith("_")}
            assert own == loggers.named(row["_step"], metrics_of(row["_step"]), TIMING)


def wandb_records(path) -> tuple:
    """The run and history rows of an offline file, once W&B's own process has written its last record, `exit`."""
    records, deadline = [], time.monotonic() + 60
    while not any(record.HasField("exit") for record in records):
        records = parsed(path.read_bytes())
        assert time.monotonic() < deadline, f"{path}: W&B did not finish it"
        time.sleep(0.05)
    (run,) = (record.run for record in records if record.HasField("run"))
    histories = [record.history.item for record in records if record.HasField("history")]
    rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one} for one in histories]
    return run, rows


def parsed(data: bytes) -> list:
    """Whole protobuf records of a file in LevelDB's log format: blocks of 32 KiB, pieces with a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, offset, payload = [], 7, b""
    while offset + 7 <= len(data):
        if (left := 32768 - offset % 32768) < 7:
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        payload += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4) and offset <= len(data):  # a whole record, or the last piece of one
            records.append(Record.FromString(payload))
            payload = b""
    return records


def test_wandb_without_an_account_is_one_line(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (requirements/test.lock has it)")

    def refused(**_):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.raises(
        UserError, match=r"^trainer\.logger: wandb can't start: No API key configured\. Use `wandb login`"
    ):
        show_steps(stage_with("wandb"), tmp_path, [0])


def test_trackio_local(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed (requirements/test.lock has it)")
    stage, before = stage_with("trackio"), generators()
    show_steps(stage, tmp_path, [0, 1, 2])
    show_steps(stage, tmp_path, [1, 2, 3])
    assert generators() == before
    (run,) = trackio.Api().runs("score-centering-tiny")
    assert run.name == "sc-seed0"
    assert run.config["arm"] == "sc"
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("score-centering-tiny", run.name, run_id=run.id)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        own = {key: value for key, value in row.items() if "/" in key}
        assert own == loggers.named(row["step"], metrics_of(row["step"]), TIMING)
