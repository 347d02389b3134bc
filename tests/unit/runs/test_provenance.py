"""What run.json says of the machine and the sources."""

import subprocess
from pathlib import Path

import pytest

import score_centering
from score_centering.runs import provenance as module
from score_centering.runs.provenance import processor, provenance


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A work tree with one commit, where the package seems to lie."""
    package = tmp_path / "src/score_centering"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(score_centering, "__file__", str(package / "__init__.py"))
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_the_commit_and_whether_the_sources_are_its(tree):
    head = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert provenance()["git_commit"] == head.stdout.strip() and len(head.stdout.strip()) == 40
    assert provenance()["git_clean"] is True
    (tree / "notes.txt").write_text("no source")
    assert provenance()["git_clean"] is True
    (tree / "src/score_centering/new.py").write_text("")
    assert provenance()["git_clean"] is False


def test_without_a_work_tree_or_git_it_is_unknown(tree, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    assert (provenance()["git_commit"], provenance()["git_clean"]) == (None, None)
    monkeypatch.undo()
    outside = tmp_path_factory.mktemp("installed") / "lib/score_centering/__init__.py"
    monkeypatch.setattr(score_centering, "__file__", str(outside))
    assert (provenance()["git_commit"], provenance()["git_clean"]) == (None, None)


def test_host_and_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(module.platform, "node", lambda: "anna")
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    assert provenance()["host"] == "anna"
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Xeon 1\n\nprocessor\t: 1\nmodel name\t: Xeon 2\n")
    assert processor(listed) == "Xeon 1"
    listed.write_text("processor\t: 0\nhart\t: 0\n")
    assert processor(listed) == processor(tmp_path / "none") == "riscv64"
