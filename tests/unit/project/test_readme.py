"""What README.md tells exists: commands, targets, programs, files, figures."""

import ast
import re
from pathlib import Path

import pytest
from snakemake.cli import get_argument_parser

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def starting(word: str) -> list[str]:
    return [command for command in COMMANDS if command.split()[0] == word]


@pytest.mark.parametrize("command", starting("make"))
def test_make_has_the_target(command):
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", starting("snakemake"))
def test_snakemake_knows_the_options_and_sees_the_target(command):
    arguments = get_argument_parser().parse_args(command.replace("'", "").split()[1:])
    targets = {"all", "sc_tis", "figures", "audit"}
    assert arguments.unlock or (arguments.targets and set(arguments.targets) <= targets)


@pytest.mark.parametrize("command", starting("python"))
def test_the_program_exists(command):
    assert (ROOT / command.split()[1]).is_file()


@pytest.mark.parametrize("path", re.findall(r"^( *\S+[/\w]) {2,}\S", README.partition("```text\n")[2], re.MULTILINE))
def test_the_file_tree_shows_what_is_there(path):
    folder = ROOT / "src/score_centering" if path.startswith(" ") else ROOT
    assert (folder / path.strip()).exists()


def test_every_folder_is_in_the_file_tree():
    tree = README.partition("```text\n")[2].partition("```")[0]
    rooms = [path.parent.name for path in (ROOT / "src/score_centering").glob("*/__init__.py")]
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")]
    assert [room for room in rooms if f"    {room}/" not in tree] == []
    assert [folder for folder in folders if f"tests/{folder}/" not in tree] == []


def test_the_workflow_declares_every_figure_that_is_drawn():
    rules = (ROOT / "workflow/rules/figures.smk").read_text()
    plots = (ROOT / "src/score_centering/figures/plots.py").read_text()
    declared = ast.literal_eval(re.search(r"^FIGURES = (\{.*?\})", rules, re.MULTILINE | re.DOTALL)[1])
    assert list(declared) == re.findall(
        r'^    "(\w+)": \w+,$', plots.partition("\nFIGURES")[2].partition("}")[0], re.MULTILINE
    )
    assert [name for name in declared if not (ROOT / f"workflow/report/{name}.rst").is_file()] == []
