"""The report's section on differences: paired with the uncorrected arm, and validation with its own error."""

from html import escape
from pathlib import Path

import numpy as np

from score_centering.figures.experiment import Experiment
from score_centering.figures.html import table
from score_centering.figures.paired import binomial_interval, paired, power, uncorrected
from score_centering.figures.series import WINDOW
from score_centering.settings.inputs import read_json

HEADS = (
    "Arm", "Difference in last reward", "Standard error", "If not paired", "Could have shown", "Seeds", "Up to step",
)  # fmt: skip


def differences(experiment: Experiment, folder: Path) -> str:
    """Paired differences from the uncorrected arm, what they could have shown, and validation with its own error."""
    looks, base = experiment.looks, uncorrected(experiment)
    others = [arm for arm in looks if arm != base] if base else []
    pairs = {arm: paired(experiment.of(base), experiment.of(arm)) for arm in others}
    found = {arm: pair for arm, pair in pairs.items() if pair}
    rows = [
        (escape(looks[arm].label), f"{pair.difference:+.3f} ± {pair.half_width:.3f}", f"{pair.error:.4f}",
         f"{pair.unpaired_error:.4f}", f"{pair.detectable:.3f}", str(pair.seeds), str(pair.last_step))
        for arm, pair in found.items()
    ]  # fmt: skip
    text = (
        f"<p>Each arm less {escape(looks[base].label)}, on the same problems, over the last {WINDOW} steps that both "
        f"have; ± is a 95 % interval. {escape(power(list(found.values())))}</p>{table(HEADS, rows)}"
        if found
        else "<p>No arm can be compared with an uncorrected one: none was run on the same problems and seeds.</p>"
    )
    return text + _validations(experiment, folder)


def _validations(experiment: Experiment, folder: Path) -> str:
    problems = read_json(folder / "dataset" / "manifest.json")["files"]["test.parquet"]["rows"]
    rows = []
    for run in experiment.runs:
        values = run.metrics["val_reward_mean"][~np.isnan(run.metrics["val_reward_mean"])]
        if values.size:
            count = min(problems, run.identity["config"]["data"]["val_batch_size"])
            low, high = binomial_interval(values[-1], count)
            label = escape(experiment.looks[run.arm].label)
            rows.append((label, str(run.seed), f"{values[-1]:.3f}", f"{low:.3f} to {high:.3f}", str(count)))
    return table(("Arm", "Seed", "Last validation", "95 % interval, binomial", "Problems"), rows)
