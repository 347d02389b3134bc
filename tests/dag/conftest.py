"""A copy of the project whose programs are stubs, and Snakemake run in it."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", re.MULTILINE)
FIELD = re.compile(r"^    (input|output|wildcards|resources): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Project:
    """A folder that holds a copy of the workflow and the configuration."""

    folder: Path

    def snakemake(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`snakemake ARGUMENTS` in the folder, with its output and errors together in `stdout`."""
        return subprocess.run(
            [sys.executable, "-m", "snakemake", "--nocolor", *arguments],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def plan(self, *arguments: str) -> str:
        """What a dry run prints."""
        result = self.snakemake("--dry-run", *arguments)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def jobs(self, *arguments: str) -> Counter[str]:
        """How many jobs of each rule a dry run would start."""
        return Counter(match[1] for match in JOB.finditer(self.plan(*arguments)))

    def run(self, *arguments: str) -> str:
        """What a run that succeeds prints."""
        result = self.snakemake("--cores", "1", *arguments)
        assert result.returncode == 0, result.stdout
        return result.stdout


def graph(plan: str) -> str:
    """The jobs of a dry run, one paragraph each: wildcards, input and output files, and whether it asks for a GPU."""
    jobs = []
    for name, body in JOB.findall(plan):
        fields = dict(FIELD.findall(body))
        gpu = "on a GPU" if "gpu=1" in fields["resources"] else ""
        lines = [" ".join(filter(None, [name, fields.get("wildcards"), gpu]))]
        for key, arrow in (("input", "<-"), ("output", "->")):
            lines += [f"  {arrow} {path}" for path in sorted(fields.get(key, "").split(", ")) if path]
        jobs.append("\n".join(lines))
    return "\n\n".join(sorted(jobs)) + "\n"


def copy_project(folder: Path) -> Project:
    """A project in `folder` whose programs are the stub."""
    shutil.copytree(ROOT / "workflow", folder / "workflow", ignore=shutil.ignore_patterns("__pycache__", "scripts"))
    shutil.copytree(ROOT / "config", folder / "config")
    shutil.copy(ROOT / "environment.yml", folder)
    (folder / "workflow/scripts").mkdir()
    for program in ("dataset", "model", "quantise", "validate", "gate", "train", "figures", "report", "audit"):
        shutil.copy(Path(__file__).parent / "stub.py", folder / f"workflow/scripts/{program}.py")
    return Project(folder)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project without results."""
    return copy_project(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose `all` is done. Tests that change it work on a copy."""
    project = copy_project(tmp_path_factory.mktemp("finished"))
    project.run("all")
    return project


@pytest.fixture
def changed(finished: Project, tmp_path: Path) -> Project:
    """A copy of the finished project, times and Snakemake's records included, that a test may change."""
    shutil.copytree(finished.folder, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")


@pytest.fixture(scope="session")
def graph_of():
    return graph
