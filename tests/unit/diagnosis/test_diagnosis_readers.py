import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from score_centering.diagnosis.columns import NAMES, OURS, QUANTITIES, choose
from score_centering.diagnosis.events import read_events
from score_centering.diagnosis.readers import read
from score_centering.runs.log import encode
from score_centering.runs.schema import METRIC_COLUMNS
from score_centering.settings import UserError
from score_centering.training.loggers import NAMES as LOGGED

FIXTURES = Path(__file__).parent / "fixtures"

# file: framework, and some quantities at the last step, read off the file by eye
SAMPLES = {
    "verl.jsonl": (
        "verl",
        {"reward": 0.35, "k3_kl": 0.00099, "k1_kl": 0.00102, "trainer_nll": 0.607, "truncated": 0.01, "length": 805},
    ),
    "verl_console.log": ("verl", {"reward": 0.34375, "k3_kl": 0.00099, "grad_norm": 0.39, "learning_rate": 1e-6}),
    "trl": ("trl", {"reward": 0.28, "abs_gap": 0.022, "abs_gap_max": 0.51, "entropy": 0.70, "truncated": 0.06}),
    "trl/trainer_state.json": ("trl", {"reward": 0.28, "ratio_max": 1.61, "grad_norm": 0.49, "loss": 0.0}),
    "prime_rl": ("prime-rl", {"reward": 0.47, "k3_kl": 0.0004, "sampler_age": 1.2, "length": 1510, "entropy": 0.30}),
    "prime_rl_console.log": ("prime-rl", {"k3_kl": 0.0004, "entropy": 0.3, "grad_norm": 0.22, "loss": 0.002}),
    "skyrl.log": ("skyrl", {"reward": 0.492, "abs_gap": 0.0107, "entropy": 0.225, "grad_norm": 0.58, "length": 229}),
    "slime.log": ("slime", {"reward": 0.531, "abs_gap": 0.022, "k3_kl": 0.0014, "truncated": 0.22, "entropy": 0.80}),
    "nemo_rl.json": (
        "nemo-rl",
        {"reward": 0.44, "k3_kl": 0.0005, "abs_gap": 0.012, "ratio_mean": 0.999, "sampler_age": 0, "length": 1031},
    ),
    "wandb_history.csv": ("verl", {"reward": 0.27, "k3_kl": 0.0012, "length": 815}),
}


@pytest.mark.parametrize("file", SAMPLES)
def test_a_sample_of_each_framework(file):
    framework, last = SAMPLES[file]
    (log,) = read(FIXTURES / file)
    assert log.framework == framework
    assert {name: log.series[name].values[-1] for name in last} == pytest.approx(last)


def test_a_console_log_keeps_its_steps():
    (log,) = read(FIXTURES / "slime.log")
    assert log.series["reward"].steps.tolist() == [0, 1]
    assert log.series["k3_kl"].steps.tolist() == [0, 1]


def test_a_chart_of_several_runs_is_one_log_each():
    first, second = read(FIXTURES / "wandb_chart.csv")
    assert first.name.endswith(": grpo-int8") and second.name.endswith(": sc-int8")
    assert first.series["reward"].values.tolist() == [0.25, 0.24]
    assert second.series["reward"].values.tolist() == [0.26, 0.29]


def test_our_run_folder_running_and_finished(tmp_path):
    state = tmp_path / "run" / "state"
    state.mkdir(parents=True)
    lines = [encode(step, {"reward_mean": 0.1 * step, "k3_kl": 2e-3}, {"step_s": 1.0}) for step in (1, 2, 3)]
    (state / "steps.log").write_bytes(b"".join(lines) + lines[0][:20])  # the last line is being written
    (running,) = read(tmp_path / "run")
    assert running.series["reward"].steps.tolist() == [1, 2, 3]
    table = pa.table({"step": [0, 1, 2], "reward_mean": [None, 0.25, 0.5], "k3_kl": [None, 1e-3, 2e-3]})
    pq.write_table(table, tmp_path / "run" / "metrics.parquet")
    (finished,) = read(tmp_path / "run")
    assert finished.framework == "score-centering"
    assert finished.series["reward"].values.tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("chosen", "corrections"),
    [
        ({"centering": True, "is_mode": "tis"}, "both"),
        ({"centering": True, "is_mode": "none"}, "centering"),
        ({"centering": False, "is_mode": "mis"}, "weights"),
        ({"centering": False, "is_mode": "none"}, "none"),
    ],
)
def test_our_settings_tell_the_corrections(tmp_path, chosen, corrections):
    pq.write_table(pa.table({"step": [1, 2], "reward_mean": [0.25, 0.5]}), tmp_path / "metrics.parquet")
    assert read(tmp_path)[0].corrections == "unknown"
    (tmp_path / "config.yaml").write_text(json.dumps({"score_centering": chosen}))  # JSON is YAML
    assert read(tmp_path)[0].corrections == read(tmp_path / "metrics.parquet")[0].corrections == corrections
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "identity.json").write_text(json.dumps({"config": {"score_centering": chosen}}))
    assert read(tmp_path)[0].corrections == corrections


def test_a_table_of_runs_gives_one_log_each(tmp_path):
    rows = {"arm": ["sc", "sc", "grpo"], "seed": [0, 0, 0], "step": [1, 2, 1], "reward_mean": [0.1, 0.2, 0.3]}
    pq.write_table(pa.table(rows), tmp_path / "runs.parquet")
    assert [log.name.split(": ")[1] for log in read(tmp_path / "runs.parquet")] == ["sc 0", "grpo 0"]


def test_tensorboard_files_written_by_tensorboard(tmp_path):
    """TensorBoard's own writer is the reference: simple values and the scalar tensors of its second format."""
    writer_of = pytest.importorskip("tensorboard.summary.writer.event_file_writer").EventFileWriter
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    tensor_pb2 = pytest.importorskip("tensorboard.compat.proto.tensor_pb2")
    types_pb2 = pytest.importorskip("tensorboard.compat.proto.types_pb2")
    writer = writer_of(str(tmp_path))
    for step in (1, 2, 300):
        plain = summary_pb2.Summary.Value(tag="critic/score/mean", simple_value=0.25 * step)
        packed = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=struct.pack("<f", 0.5 * step))
        listed = tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, double_val=[1e-3 * step])
        text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[b"hello"])
        values = [
            plain,
            summary_pb2.Summary.Value(tag="actor/entropy", tensor=packed),
            summary_pb2.Summary.Value(tag="rollout_corr/k3_kl", tensor=listed),
            summary_pb2.Summary.Value(tag="note", tensor=text),
        ]
        writer.add_event(event_pb2.Event(step=step, wall_time=1.0, summary=summary_pb2.Summary(value=values)))
    writer.close()
    (log,) = read(tmp_path)
    assert log.series["reward"].steps.tolist() == [1, 2, 300]
    assert log.series["reward"].values.tolist() == [0.25, 0.5, 75.0]
    assert log.series["entropy"].values.tolist() == [0.5, 1.0, 150.0]
    assert log.series["k3_kl"].values == pytest.approx([1e-3, 2e-3, 0.3])


def record(payload: bytes) -> bytes:
    return struct.pack("<Q", len(payload)) + b"\0" * 4 + payload + b"\0" * 4


def test_an_event_by_hand_and_a_torn_one(tmp_path):
    # Event: step (field 2) 5; summary (field 5) of one value (field 1): tag (field 1) "r", simple_value (field 2) 1.5
    value = b"\x0a\x01r" + b"\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    event = b"\x10\x05" + b"\x2a" + bytes([len(summary)]) + summary
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(record(event) + record(event)[:-7])
    assert list(read_events(file)) == [(5, "r", 1.5)]
    file.write_bytes(record(b"\x2a\xff"))
    with pytest.raises(UserError, match="no TensorBoard event at byte 0"):
        list(read_events(file))


def test_a_resumed_run_keeps_the_later_value(tmp_path):
    rows = [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)]
    text = "".join(json.dumps({"step": step, "reward_mean": reward}) + "\n" for step, reward in rows)
    (tmp_path / "log.jsonl").write_text(text)
    (log,) = read(tmp_path / "log.jsonl")
    assert log.series["reward"].values.tolist() == [0.1, 0.25, 0.35]


def test_overrides():
    (log,) = read(FIXTURES / "verl.jsonl", {"reward": "critic/rewards/mean"})
    assert log.choices["reward"].framework == "--column"
    assert log.series["reward"].values.tolist() == [0.30, 0.34]


@pytest.mark.parametrize(
    ("name", "content", "overrides", "message"),
    [
        ("a.jsonl", '{"step": 1, "reward": 1}\nnot json\n{"step": 2}\n', {}, "line 2 is not JSON"),
        ("a.jsonl", "", {}, "holds no step with a number"),
        ("a.json", "{", {}, "not JSON"),
        ("a.json", "3", {}, "JSON of no known shape"),
        ("a.parquet", "no parquet", {}, "not a readable parquet file"),
        ("a.csv", "step,apples\n1,2\n", {}, "no column with a known name.*the log has apples"),
        ("a.csv", "step,reward_mean\n1,2\n", {"rewrd": "reward_mean"}, "no such quantity; allowed are reward"),
        ("a.csv", "step,reward_mean\n1,2\n", {"reward": "x"}, "no such column; it has reward_mean"),
    ],
)
def test_bad_logs_in_one_line(tmp_path, name, content, overrides, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path / name, overrides)
    assert "\n" not in str(error.value)


def test_each_run_of_an_experiment(tmp_path):
    for arm in ("grpo", "sc"):
        run = tmp_path / "runs" / arm / "seed0"
        run.mkdir(parents=True)
        pq.write_table(pa.table({"step": [1, 2], "reward_mean": [0.25, 0.5]}), run / "metrics.parquet")
        (run / "config.yaml").write_text(json.dumps({"score_centering": {"centering": arm == "sc"}}))
    logs = read(tmp_path)
    assert [(Path(log.name).parent.name, log.corrections) for log in logs] == [("grpo", "none"), ("sc", "centering")]


def test_each_folder_of_events_is_a_run(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        value = b"\x0a\x06reward" + b"\x15" + struct.pack("<f", 1.5)
        event = b"\x10\x05\x2a" + bytes([len(value) + 2]) + b"\x0a" + bytes([len(value)]) + value
        (tmp_path / name / "events.out.tfevents.1").write_bytes(record(event))
    assert [Path(log.name).name for log in read(tmp_path)] == ["a", "b"]


def test_damaged_settings_in_one_line(tmp_path):
    pq.write_table(pa.table({"step": [1, 2], "reward_mean": [0.25, 0.5]}), tmp_path / "metrics.parquet")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml: not the settings of a run"):
        read(tmp_path)


def test_missing_logs(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"a folder without metrics\.parquet"):
        read(tmp_path)


def test_every_name_belongs_to_a_quantity():
    assert {name.quantity for name in NAMES} <= set(QUANTITIES)


def test_our_names_are_those_that_we_write():
    """Columns of a run folder, and what loggers call them; the last three are of studies and planted runs."""
    written = {column.name for column in METRIC_COLUMNS} | {"reward_rollouts", "trainer_nll", "sampler_nll"}
    assert {name.pattern for name in NAMES if name.framework == OURS} <= written
    shown = {column: LOGGED[column] for column in LOGGED if column in written}
    chosen = choose([name for name in shown.values() if name != LOGGED["step"]])
    for quantity, choice in choose(shown).items():
        assert chosen[quantity].column == shown[choice.column]


def test_a_shared_name_goes_to_the_framework_of_the_others():
    chosen = choose(["reward", "entropy", "loss", "completions/mean_length", "learning_rate"])
    assert {choice.framework for choice in chosen.values()} == {"trl"}
    chosen = choose(["reward_mean", "entropy", "loss", "k3_kl"])
    assert {choice.framework for choice in chosen.values()} == {"score-centering"}


def test_values_that_are_not_finite_are_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1, "k3_kl": NaN}\n{"step": 2, "k3_kl": Infinity}\n')
    (log,) = read(tmp_path / "a.jsonl")
    assert np.isnan(log.series["k3_kl"].values[0]) and np.isinf(log.series["k3_kl"].values[1])
