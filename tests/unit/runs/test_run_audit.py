"""What `snakemake audit` says of runs made by other code or settings, and of files changed since."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.runs.audit import audit
from score_centering.settings import UserError

TODAY = {"sc": {"trainer": {"lr": 0.1}}}
CLEAN = "finished, 5 steps; made by the code and settings of today"


@pytest.fixture
def run_dir(tmp_path, train):
    folder = tmp_path / "tiny" / "runs" / "sc" / "seed0"
    train(folder)
    return folder


def said(run_dir, configs=None, w8a8=None):
    (found,) = audit(run_dir.parents[2], TODAY if configs is None else configs, {"sc": w8a8})
    assert found.line().startswith(f"{run_dir}: ")
    return found.line().removeprefix(f"{run_dir}: ")


def test_a_run_of_today(run_dir):
    assert said(run_dir) == CLEAN


def test_other_code(run_dir, monkeypatch):
    monkeypatch.setattr("score_centering.runs.audit.package_digest", lambda: "f" * 64)
    assert "finished, 5 steps; other code (package " in said(run_dir)
    assert "; today ffffffffffff)" in said(run_dir)


def test_other_settings(run_dir):
    assert said(run_dir, {"sc": {"trainer": {"lr": 0.2}}}).endswith("config.trainer.lr: 0.1 there, 0.2 here")
    assert said(run_dir, {}).endswith("arm sc is not in today's configuration")


def test_other_inputs_and_versions(run_dir, monkeypatch):
    (run_dir.parents[2] / "dataset").mkdir()
    (run_dir.parents[2] / "dataset" / "manifest.json").write_text("{}")
    assert "dataset_manifest_sha256: null there, " in said(run_dir)
    monkeypatch.setattr("score_centering.runs.audit.installed", lambda: {"torch": "9.9"})
    assert "here; versions." in said(run_dir)


def test_another_w8a8_model(tmp_path, train):
    config = tmp_path / "config.json"
    config.write_text("{}")
    run_dir = tmp_path / "tiny" / "runs" / "sc" / "seed0"
    train(run_dir, quantised_config=config)
    assert said(run_dir, w8a8=config) == CLEAN
    assert said(run_dir, w8a8=None) == CLEAN, "an arm that has none today differs by its settings"
    config.write_text('{"quantization_config": {}}')
    assert "; quantised_config_sha256: " in said(run_dir, w8a8=config)
    config.unlink()
    assert said(run_dir, w8a8=config) == CLEAN


def test_files_that_were_changed_or_lost(run_dir):
    with (run_dir / "metrics.parquet").open("r+b") as file:
        file.write(b"X")
    (run_dir / "timing.parquet").unlink()
    line = said(run_dir)
    assert "DAMAGED: metrics.parquet was changed after it was published" in line
    assert "DAMAGED: timing.parquet is missing" in line


def test_a_run_that_never_finished(tmp_path, fork, train):
    def stop(step, run):
        if step == 3:
            raise SystemExit(9)

    folder = tmp_path / "tiny" / "runs" / "sc" / "seed0"
    assert fork(lambda: train(folder, on_step=stop)).code == 9
    assert said(folder).startswith("unfinished, 2 steps; ")


def test_published_files_beside_an_unfinished_state_are_checked(run_dir, fork, train):
    def stop(step, run):
        if step == 3:
            raise SystemExit(9)

    assert fork(lambda: train(run_dir, on_step=stop)).code == 9  # by hand, in front of the published files
    assert said(run_dir) == "unfinished, 2 steps; made by the code and settings of today"
    (run_dir / "run.json").write_text("{}")
    (run_dir / "config.yaml").unlink()
    line = said(run_dir)
    assert "DAMAGED: run.json was changed after it was published" in line
    assert "DAMAGED: config.yaml is missing" in line
    for name in ("metrics.parquet", "timing.parquet", "run.json"):
        (run_dir / name).unlink()
    assert "DAMAGED" not in said(run_dir), "the workflow makes all of them again"


def test_a_running_run(run_dir, identity):
    from score_centering.runs import open_run

    with open_run(run_dir, identity()):
        assert said(run_dir).startswith("running, no step so far; ")


def test_a_copied_run_and_an_unreadable_one(run_dir):
    (run_dir / "state" / "identity.json").write_text("{")
    assert said(run_dir).startswith("unknown; DAMAGED: ")
    assert "identity.json: not valid JSON" in said(run_dir)
    shutil.rmtree(run_dir / "state")
    assert said(run_dir) == "copied without its state; made by the code and settings of today"


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["state/identity.json", "state/PUBLISHED", "run.json"]), content=JSON, data=st.data())
def test_any_json_in_place_of_a_record_is_one_line(run_dir, name, content, data):
    path = run_dir / name
    good = path.read_bytes()
    if data.draw(st.booleans()):
        record = json.loads(good)
        record[data.draw(st.sampled_from(sorted(record)))] = content
        content = record
    path.write_text(json.dumps(content))
    try:
        assert "\n" not in said(run_dir)
    finally:
        path.write_bytes(good)


def test_no_run_at_all(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        audit(tmp_path, {}, {})
