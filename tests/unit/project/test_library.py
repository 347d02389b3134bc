"""The package as a library: docs/library.md is true, and nothing of it needs what only the pipeline installs."""

import doctest
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from score_centering.runs import schema

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/library.md"
PIPELINE = ("snakemake", "llmcompressor", "reasoning_gym")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = (
    "objectives",
    "precision.registry",
    "runs.schema",
    "reward",
    "data",
    "settings",
    "rollout",
    "diagnosis",
    "figures.report",
)


def write_run(folder: Path) -> None:
    """metrics.parquet of two steps with rewards 0.25 and 0.5."""
    given = {"step": [1, 2], "reward_mean": [0.25, 0.5]}
    columns = {field.name: pa.array(given.get(field.name, [None, None]), field.type) for field in schema.METRICS}
    table = pa.table(columns, schema=schema.METRICS)
    metadata = {"experiment": "e", "arm": "sc", "seed": "0"}
    (folder / "metrics.parquet").write_bytes(schema.table_bytes(table, metadata))


def test_the_page(tmp_path):
    write_run(tmp_path)
    ended = doctest.testfile(str(PAGE), module_relative=False, globs={"RUN": str(tmp_path)}, encoding="utf-8")
    assert ended.failed == 0 and ended.attempted > 12


def test_the_loss_takes_ten_lines_at_most():
    block = PAGE.read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]
    assert sum(line.startswith((">>>", "...")) for line in block.splitlines()) <= 10


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_without_the_pipelines_packages(room):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({PIPELINE!r})); import score_centering.{room}"
    ended = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_pipelines_packages_are_an_extra():
    names = {line.partition("==")[0].replace("-", "_") for line in PROJECT["optional-dependencies"]["pipeline"]}
    assert names == set(PIPELINE)
    assert not any(line.startswith(("snakemake", "llmcompressor", "reasoning")) for line in PROJECT["dependencies"])
