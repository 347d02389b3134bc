"""README's numbers of the default run are those that a run wrote."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loading import load
from score_centering.figures.facts import collect, phrases

ROOT = Path(__file__).parents[3]
README = " ".join((ROOT / "README.md").read_text().split())


def test_readme_tells_the_numbers_of_the_default_run():
    facts = json.loads((ROOT / "docs/default-run.json").read_text())
    missing = [phrase for phrase in phrases(facts) if phrase not in README]
    assert not missing, (
        "after a default run: python workflow/scripts/facts.py results/<experiment>, then edit README.md"
    )


def test_no_page_guesses_the_size_of_the_default_model():
    assert not re.search(r"about [\d.]+ ?M parameters", README)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    synthetic = load("unit/figures/synthetic_experiment.py")
    folder = synthetic.write_experiment(tmp_path_factory.mktemp("e") / "tiny", ("grpo", "sc"), steps=20)
    for arm, rewards in (("low", [0.25] * 10 + [0.5] * 10), ("high", [0.25] * 10 + [0.75] * 10)):
        synthetic.write_run(folder, arm, 0, 20, {"reward_mean": rewards})
    for arm in ("grpo", "sc"):
        for path in (folder / "runs" / arm / "seed0").iterdir():
            path.unlink()
        (folder / "runs" / arm / "seed0").rmdir()
        (folder / "runs" / arm).rmdir()
    return folder


def test_facts_are_what_the_files_say(folder):
    facts = collect(folder)
    assert facts == {
        "experiment": "tiny",
        "parameters": 1_100_000,
        "problems": {"train": 2000, "test": 50},
        "runs": {
            "arms": 2,
            "steps": 20,
            "reward_first": [0.25, 0.25],
            "reward_last": [0.5, 0.75],
            "peak_rss_bytes": 700_000_000,
        },
    }
    assert phrases(facts) == [
        "1,100,000 parameters",
        "20 steps",
        "from 0.25 to between 0.50 and 0.75",
        "peak resident memory was 0.70 GB",
    ]


def test_the_program_lists_what_readme_lacks(folder, tmp_path):
    readme, output = tmp_path / "README.md", tmp_path / "facts.json"
    readme.write_text("1,100,000\nparameters, 20 steps, from 0.25 to between 0.50 and 0.75")
    program = [sys.executable, str(ROOT / "workflow/scripts/facts.py"), str(folder)]
    command = [*program, "--output", str(output), "--readme", str(readme)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("MISSING")] == [
        "MISSING: peak resident memory was 0.70 GB"
    ]
    assert json.loads(output.read_text()) == collect(folder)
