"""docs/architecture.md: every name exists, the phases are the loop's, and a change touches the files that it lists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src/score_centering"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
FIGURE = re.search(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)[1]
QUOTED = dict.fromkeys(re.findall(r"`([^`\n]+)`", PAGE.replace(FIGURE, "")))
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
PATHS = [text for text in QUOTED if "/" in text and not text.endswith("score_centering/")]
NAMES = [text for text in QUOTED if text.partition(".")[0] in ROOMS and "/" not in text]


def defined(name: str) -> bool:
    """Whether a dotted name below the package is a module, or a class, function, method or value in one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:depth]).with_suffix(".py")
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            for part in parts[depth:]:
                found = [node for node in body if part in (getattr(node, "name", None), target(node))]
                if not found:
                    return False
                body = getattr(found[0], "body", [])
            return True
    return False


def target(node: ast.AST) -> str | None:
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None


def mentions(word: str) -> set[str]:
    """Files of package and configuration that hold `word`, tests and generated files aside."""
    files = [*PACKAGE.rglob("*.py"), ROOT / "config/config.yaml", *(ROOT / "workflow").rglob("*.smk")]
    found = (path for path in files if re.search(rf"\b{word}\b", path.read_text(encoding="utf-8")))
    return {str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)) for path in found}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path):
    assert (PACKAGE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_defined(name):
    assert defined(name)


def test_a_name_that_is_gone_would_be_missed():
    assert len(PATHS) > 10 and len(NAMES) > 25
    assert not defined("training.loop.RunLoop.jump") and not defined("training.nowhere")
    assert defined("training.loop.RunLoop.go") and defined("rollout.local.architecture.FAMILIES")


@pytest.mark.parametrize("path", re.findall(r"[\w/*]+/[\w.*]*", FIGURE.replace("<br>", " ")))
def test_the_figure_s_files_exist(path):
    found = [*PACKAGE.glob(path.rstrip("/")), *ROOT.glob(path.rstrip("/"))]
    assert found or path == "state/steps.log"


def test_the_phases_are_those_of_the_loop_in_its_order():
    source = (PACKAGE / "training/loop.py").read_text(encoding="utf-8")
    step = source[source.index("def _step") : source.index("def _validate")]
    phases = re.findall(r'run\.phase\("(\w+)"\)', step)
    rows = PAGE[PAGE.index("## A step") : PAGE.index("## After")]
    assert [name for name in re.findall(r"^\| (\w+) \|", rows, re.MULTILINE) if name != "phase"] == phases
    assert re.findall(r'\w+\["(\w+): \w+/"\]', FIGURE) == phases


def row(change: str) -> list[str]:
    """The cells of a row of the table of changes."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {change}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("change", "word"),
    [("a weight with a bound", "mis_min"), ("a number format", "mxfp8"), ("a dense architecture", "qwen3")],
)
def test_a_change_touches_the_files_that_are_listed(change, word):
    """`word` stands for a change of that kind that was made: a weight's bound, the last format, the last family."""
    _, _, count, files = row(change)
    listed = set(re.findall(r"`([^`]+)`", files))
    assert len(listed) == int(re.match(r"\d+", count)[0])
    assert mentions(word) == listed
