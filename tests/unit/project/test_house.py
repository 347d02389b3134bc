"""Each thing once, and nothing that nobody uses: file names, public names, settings."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from score_centering.settings.block import Block
from score_centering.settings.model import Settings

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src/score_centering"
PROGRAMS = [*(ROOT / "workflow").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").rglob("*.py")]
SNAKEFILES = [*(ROOT / "workflow").rglob("*.smk"), ROOT / "workflow/Snakefile"]
# Public for what they define: nothing but tests calls them, and those hold faster code or whole programs against them.
DEFINITIONS = {
    "policy_loss_from_logits": "the loss of given logits, without the chunks over an LM head",
    "dequantise_weight": "the weight that codes and scales stand for, as compressed-tensors says it",
    "int8_matmul": "the exact product of either device, which the fused paths round the same way",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_used(node: ast.AST) -> Iterator[str]:
    """Names that are read, imported under another name, or written in a text: registries and entry points name so."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias) and node.asname:
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        yield node.value.rpartition(".")[2]


def exported() -> set[int]:
    """The texts of every `__all__`, which use nothing."""
    listed = [
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {id(entry) for value in listed for entry in ast.walk(value)}


def used() -> set[str]:
    """Every name that the package, the workflow, a benchmark or a figure's script of the docs uses."""
    skipped = exported()
    paths = [*PACKAGE.rglob("*.py"), *PROGRAMS]
    nodes = (node for path in paths for node in ast.walk(tree(path)) if id(node) not in skipped)
    found = {name for node in nodes for name in names_used(node)}
    found |= {word for path in SNAKEFILES for word in re.findall(r"\w+", path.read_text())}
    return found | set(re.findall(r":(\w+)\"", (ROOT / "pyproject.toml").read_text()))


def public(path: Path) -> Iterator[str]:
    """Functions and classes of a module, and methods of classes that build on no other: those may be called by it."""
    for node in tree(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not any(isinstance(mark, ast.Call) for mark in node.decorator_list):  # such as @register("…")
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (each.name for each in methods if not each.name.startswith("_"))


def keys(block: type[Block]) -> Iterator[str]:
    """Every key of the configuration, blocks of blocks included; a block that `source` chooses is read by its name."""
    source = block.model_fields.get("source")
    chosen = get_args(source.annotation) if source else ()
    for name, field in block.model_fields.items():
        if name not in chosen:
            yield name
        pending = [field.annotation]
        while pending:
            annotation = pending.pop()
            if isinstance(annotation, type) and issubclass(annotation, Block):
                yield from keys(annotation)
            pending.extend(get_args(annotation))


def keys_read() -> set[str]:
    """Attributes that any code reads, and parameters that a block is unpacked into."""
    nodes = [node for path in [*modules(), *PROGRAMS] for node in ast.walk(tree(path))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return read | {word for path in SNAKEFILES for word in re.findall(r"\.(\w+)", path.read_text())}


def test_a_file_name_is_one_file():
    assert [name for name, count in Counter(path.name for path in modules()).items() if count > 1] == []


def test_a_class_name_is_one_class():
    """Of the package's public classes, so that a search for a name ends in one place."""
    classes = [
        node.name for path in PACKAGE.rglob("*.py") for node in tree(path).body if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(classes).items() if count > 1 and not name.startswith("_")] == []


def test_a_public_name_has_a_caller_beside_the_tests():
    found = used()
    unused = {
        f"{path.relative_to(PACKAGE)}: {name}" for path in modules() for name in public(path) if name not in found
    }
    assert {entry for entry in unused if entry.partition(": ")[2] not in DEFINITIONS} == set()
    assert {entry.partition(": ")[2] for entry in unused} == set(DEFINITIONS)  # one that got a caller leaves the list


def test_a_setting_has_a_reader():
    assert set(keys(Settings)) - keys_read() == set()


def test_no_file_is_too_long_to_read():
    """450 lines at most: a longer one holds more than one thing."""
    files = [
        path for room in ("src", "tests", "workflow", "benchmarks", "docs") for path in (ROOT / room).rglob("*.py")
    ]
    counted = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*files, *SNAKEFILES]}
    assert len(counted) > 300
    assert {str(path.relative_to(ROOT)): count for path, count in counted.items() if count > 450} == {}
