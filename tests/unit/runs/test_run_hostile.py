"""Odd paths, and loaders that could execute code."""

import ast
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import score_centering
from score_centering.runs import open_run, schema

NAMES = ["with space", "quote'\"s", "ünï-日本", "semi;colon$(x)", "dots..", "-dash", "new\nline", "tab\t*?[]", "%s{}"]


@pytest.mark.parametrize("name", NAMES)
def test_odd_paths_work_and_nothing_is_written_outside(tmp_path, train, uninterrupted, name):
    run_dir = tmp_path / "results" / name / "runs" / "sc" / "seed0"
    assert train(run_dir) == 0
    assert (run_dir / "metrics.parquet").read_bytes() == uninterrupted
    assert schema.read_metrics(run_dir / "metrics.parquet").num_rows == 5
    parents = {tmp_path / "results", *(path for path in run_dir.parents if path.is_relative_to(tmp_path / "results"))}
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(run_dir)} == parents


def test_a_path_with_dots_stays_where_it_says(tmp_path, train, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    train(Path("results/../results/a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["a"]


def test_names_from_the_identity_never_become_paths(tmp_path, identity):
    with open_run(tmp_path / "run", identity(arm="../../evil", experiment="/etc")) as run:
        run.resume()
        run.record_step(1, {}, {})
        run.publish("", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


class Touch:
    """Unpickling it makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_schema_of_a_table_is_not_loaded(tmp_path):
    marker = tmp_path / "ran"
    extension = {"ARROW:extension:name": "arrow.py_extension_type"}
    extension["ARROW:extension:metadata"] = pickle.dumps(Touch(marker))
    fields = [field.with_metadata(extension) if field.name == "loss" else field for field in schema.METRICS]
    labels = {"experiment": "e", "arm": "a", "seed": "0", "schema_version": "2"}
    rows = pa.table(
        [pa.nulls(1, f.type) if f.name != "step" else pa.array([1], f.type) for f in fields], pa.schema(fields)
    )
    pq.write_table(rows.replace_schema_metadata(labels), tmp_path / "metrics.parquet")
    assert schema.read_metrics(tmp_path / "metrics.parquet").num_rows == 1
    assert not marker.exists()


FORBIDDEN = {
    "pickle", "dill", "joblib", "shelve", "marshal",  # loaders that execute code
}  # fmt: skip


def sources() -> list[Path]:
    root = Path(score_centering.__file__).parent
    programs = [path for name in ("workflow", "benchmarks") for path in (root.parents[1] / name).rglob("*.py")]
    return [*root.rglob("*.py"), *programs]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_no_loader_can_execute_code(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"), called
            if called in ("np.load", "numpy.load"):
                assert any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords)
            if called == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            assert not any(k.arg == "trust_remote_code" and ast.unparse(k.value) != "False" for k in node.keywords)
