"""What README tells of the default run, as its files say it; a test holds README to it."""

from pathlib import Path
from typing import Any

import numpy as np

from score_centering.figures.experiment import read_experiment
from score_centering.figures.summary import summarise_run
from score_centering.settings.inputs import read_json

Facts = dict[str, Any]


def collect(folder: Path) -> Facts:
    """Numbers of the experiment in `folder`: its model and problems and, where it has runs, what they showed.

    Rewards are means of the summary's windows, memory is in bytes.

    Raises:
        UserError: a manifest is missing, or a run that has begun has not finished.
    """
    model, dataset = read_json(folder / "model/manifest.json"), read_json(folder / "dataset/manifest.json")
    rows = {Path(name).stem: file["rows"] for name, file in dataset["files"].items()}
    facts: Facts = {"experiment": folder.name, "parameters": model["parameters"], "problems": rows, "runs": None}
    if (folder / "runs").is_dir():
        runs = read_experiment(folder).runs
        ends = {name: [summarise_run(run)[f"reward_{name}"] for run in runs] for name in ("first", "last")}
        facts["runs"] = {
            "arms": len({run.arm for run in runs}),
            "steps": int(max(run.steps[-1] for run in runs)),
            "reward_first": [min(ends["first"]), max(ends["first"])],
            "reward_last": [min(ends["last"]), max(ends["last"])],
            "peak_rss_bytes": int(max(np.nanmax(run.timing["peak_rss_bytes"]) for run in runs)),
        }
    return facts


def phrases(facts: Facts) -> list[str]:
    """What README must say word for word."""
    said = [f"{facts['parameters']:,} parameters"]
    runs = facts["runs"]
    if runs is not None:
        first, last = (_span(runs[f"reward_{name}"]) for name in ("first", "last"))
        said += [f"{runs['steps']} steps", f"from {first} to {last}"]
        said += [f"peak resident memory was {runs['peak_rss_bytes'] / 1e9:.2f} GB"]
    return said


def _span(ends: list[float]) -> str:
    low, high = (f"{value:.2f}" for value in ends)
    return low if low == high else f"between {low} and {high}"
