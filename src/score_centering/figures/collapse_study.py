"""The map of the collapse: conditions against arm, as one table of runs, one figure and one page of text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from score_centering.figures import outcome
from score_centering.figures.law import Law, area, law
from score_centering.figures.scan import described
from score_centering.figures.series import mean_of_measured
from score_centering.runs import schema
from score_centering.settings import UserError
from score_centering.settings.stages import CollapseStage
from score_centering.settings.studies import collapse_cell, conditions_of
from score_centering.settings.study_blocks import Conditions

AXES = tuple(Conditions.model_fields)
EARLY = 5  # updates
LOST, LOWERED, HELD = "lost", "lowered", "held"

RUNS = described(
    [
        ("precision", pa.string(), "", "of the rollouts, as the configuration calls it"),
        ("rate", pa.float64(), "1", "multiple of the bound's own learning rate"),
        ("entropy", pa.string(), "", "the model that training starts from"),
        ("bound", pa.string(), "", "what bounds a step"),
        ("arm", pa.string(), "", "name of the arm"),
        ("seed", pa.int32(), "", "seed of the run"),
        ("steps", pa.int32(), "steps", "last step of the run"),
        ("reward_last", pa.float64(), "1", f"mean reward of the last {outcome.WINDOW} steps"),
        ("reward_peak", pa.float64(), "1", f"largest mean reward of {outcome.WINDOW} consecutive steps"),
        ("reward_best", pa.float64(), "1", "the larger of reward_peak and the clean reward before training"),
        ("control_last", pa.float64(), "1", "reward_last of the control: the same conditions but for the precision"),
        (
            "control_healthy", pa.bool_(), "",
            f"the control ends at {outcome.HEALTHY_FROM:.0%} of its own peak or above, and not at 0",
        ),
        ("outcome", pa.string(), "", f"{LOST}, {LOWERED} or {HELD} against the control; null where it has not run"),
        ("early_k3_kl", pa.float64(), "nats/token", f"mean K3 of the first {EARLY} updates"),
        ("early_entropy", pa.float64(), "nats/token", f"mean entropy of the policy in the first {EARLY} updates"),
        ("early_grad_norm", pa.float64(), "1", f"mean gradient norm of the first {EARLY} updates"),
        ("early_reward_mean", pa.float64(), "1", f"mean reward of the first {EARLY} updates"),
        ("early_drift_norm", pa.float64(), "1", f"mean drift norm of the first {EARLY} updates; null: not measured"),
        (
            "early_drift_coherence", pa.float64(), "1",
            f"coherence of the drift at its last measurement of the first {EARLY} updates; null: not measured",
        ),
    ]
)  # fmt: skip
FEATURES = ("rate", *(name for name in RUNS.names if name.startswith("early_")))
WORDS = {
    "nothing": "nothing differs: both hold",
    "saved": "uncorrected is lost, {arm} holds",
    "helped": "uncorrected is lowered, {arm} holds",
    "both": "neither holds",
    "costs": "uncorrected holds, {arm} does not",
    "unstable": "the control itself falls, or earns nothing",
}
"""Verdict on a cell → what it says, of an arm with a correction."""


def collapse_table(stage: CollapseStage, folder: Path) -> pa.Table:
    """One row a run of the grid that lies at `folder`/<cell>/<arm>/seed<k>, cell by cell, then by arm and seed.

    Raises:
        UserError: there is none.
    """
    rows = [
        {**dict(conditions), "arm": arm, "seed": seed, **_measured(path)}
        for conditions in conditions_of(stage.grid)
        for arm in stage.arms
        for seed in stage.seeds
        if (path := folder / collapse_cell(conditions) / arm / f"seed{seed}" / "metrics.parquet").is_file()
    ]
    if not rows:
        raise UserError(f"{folder}: holds no run of the grid (<cell>/<arm>/seed<k>/metrics.parquet)")
    return pa.Table.from_pandas(_judged(pd.DataFrame(rows), stage), schema=RUNS, preserve_index=False)


def _measured(path: Path) -> dict[str, float | int]:
    metrics = schema.read_metrics(path).to_pandas()
    before = metrics.loc[metrics["step"] == 0, "clean_reward_mean"]
    end = outcome.ending(metrics["reward_mean"], float(before.iloc[0]) if len(before) else np.nan)
    early = metrics[metrics["step"].between(1, EARLY)]
    means = {name: float(mean_of_measured(early[name].to_numpy(np.float64))) for name in
             ("k3_kl", "entropy", "grad_norm", "reward_mean", "drift_norm")}  # fmt: skip
    coherence = early["drift_coherence"].dropna()
    return {
        "steps": int(metrics["step"].max()),
        "reward_last": end.last,
        "reward_peak": end.peak,
        "reward_best": end.best,
        **{f"early_{name}": value for name, value in means.items()},
        "early_drift_coherence": float(coherence.iloc[-1]) if len(coherence) else np.nan,
    }


def _judged(runs: pd.DataFrame, stage: CollapseStage) -> pd.DataFrame:
    """The runs with their control's end and what they are called by it."""
    shared = [*(axis for axis in AXES if axis != "precision"), "seed"]
    controls = runs[(runs["precision"] == stage.control) & (runs["arm"] == stage.arms[0])].set_index(shared)
    well = pd.Series(outcome.healthy(controls["reward_last"], controls["reward_peak"]), controls.index, dtype=object)
    runs = runs.join(controls["reward_last"].rename("control_last"), on=shared)
    runs = runs.join(well.rename("control_healthy"), on=shared)
    runs["control_healthy"] = runs["control_healthy"].where(runs["control_healthy"].notna(), None)
    last, control = runs["reward_last"], runs["control_last"]
    called = np.where(
        outcome.lost(last, runs["reward_best"], control), LOST, np.where(outcome.held(last, control), HELD, LOWERED)
    )
    return runs.assign(outcome=pd.Series(called, runs.index, dtype=object).where(control.notna(), None))


def verdicts(runs: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """A row a cell and corrected arm: how many of how many runs of either are lost and held, where they end, and the
    verdict, a key of WORDS.

    A cell is told by what more than half of an arm's runs are called, and is `unstable` unless more than half of the
    controls are healthy. Runs without a control do not count; a cell without a run of either arm has no row.
    """
    rows, judged = [], runs[runs["outcome"].notna()]
    for cell, own in judged.groupby(list(AXES), sort=False):
        uncorrected = own[own["arm"] == arms[0]]
        for arm in arms[1:]:
            corrected = own[own["arm"] == arm]
            if len(uncorrected) and len(corrected):
                row = dict(zip(AXES, cell, strict=True)) | {"arm": arm, "verdict": _verdict(uncorrected, corrected)}
                for name, part in (("uncorrected", uncorrected), ("corrected", corrected)):
                    row |= {f"{name}_{word}": int((part["outcome"] == word).sum()) for word in (LOST, HELD)}
                    row |= {f"{name}_runs": len(part), f"{name}_last": float(part["reward_last"].mean())}
                rows.append(row)
    return pd.DataFrame(rows)


def _verdict(uncorrected: pd.DataFrame, corrected: pd.DataFrame) -> str:
    if not _most(uncorrected["control_healthy"].astype(bool)):
        return "unstable"
    holds = _most(corrected["outcome"] == HELD)
    if _most(uncorrected["outcome"] == HELD):
        return "nothing" if holds else "costs"
    if not holds:
        return "both"
    return "saved" if _most(uncorrected["outcome"] == LOST) else "helped"


def _most(flags: pd.Series) -> bool:
    return bool(2 * flags.sum() > len(flags))


def conditions_taken_away(runs: pd.DataFrame, stage: CollapseStage) -> pd.DataFrame:
    """See `outcome.taken_away`: the reference's conditions, and each other level in the place of one of them."""
    same = {axis: runs[axis] == value for axis, value in stage.reference}
    every = pd.concat(same, axis=1).all(axis=1)
    cases = {"every condition": every}
    for axis in AXES:
        others = pd.concat([flags for name, flags in same.items() if name != axis], axis=1).all(axis=1)
        for level in dict.fromkeys(runs[axis]):
            if level != getattr(stage.reference, axis):
                cases[f"{axis} {_level(level)}"] = others & (runs[axis] == level)
    return _counted(runs, cases, stage.arms)


def by_level(runs: pd.DataFrame, stage: CollapseStage) -> pd.DataFrame:
    """The same over the whole map: all runs of each level of each axis, but for those of the control's precision."""
    others = runs["precision"] != stage.control
    cases = {
        f"{axis} {_level(level)}": others & (runs[axis] == level)
        for axis in AXES
        for level in dict.fromkeys(runs.loc[others, axis])
    }
    return _counted(runs, cases, stage.arms)


def _counted(runs: pd.DataFrame, cases: dict[str, pd.Series], arms: Sequence[str]) -> pd.DataFrame:
    return outcome.taken_away(runs, cases, {arm: arm for arm in arms}, runs["outcome"] == LOST, LOST)


def _level(level: float | str) -> str:
    return level if isinstance(level, str) else f"{level:g}"


def map_law(runs: pd.DataFrame, stage: CollapseStage) -> tuple[Law, dict[str, float]] | None:
    """Which uncorrected runs are lost, from their rate and first updates: the law, and the area of each feature alone
    over all these runs. Features that some run lacks are left out. None where fewer than two are lost or are not."""
    chosen = runs[(runs["arm"] == stage.arms[0]) & (runs["precision"] != stage.control) & runs["outcome"].notna()]
    target = (chosen["outcome"] == LOST).to_numpy(float)
    if min(target.sum(), len(target) - target.sum()) < 2:
        return None
    features = [name for name in FEATURES if chosen[name].notna().all()]
    inputs = chosen[features].to_numpy(float)
    cells = ["|".join(map(str, cell)) for cell in chosen[list(AXES)].itertuples(index=False)]
    alone = {name: area(inputs[:, index], target) for index, name in enumerate(features)}
    return law(inputs, target, cells, features), alone


def page(table: pa.Table, stage: CollapseStage) -> str:
    """The text beside the figure, in Markdown: verdicts, conditions taken away, levels over the whole map, the law."""
    runs = table.to_pandas()
    cells = verdicts(runs, stage.arms)
    parts = ["# Where training collapses", _counts(cells, stage.arms, len(runs))]
    parts += ["## One condition taken away", _matters(runs, stage), _markdown(conditions_taken_away(runs, stage))]
    parts += ["## By level, over the whole map", _markdown(by_level(runs, stage))]
    parts += ["## From the first five updates", _told(map_law(runs, stage), stage.arms[0])]
    return "\n\n".join(parts) + "\n"


def _counts(cells: pd.DataFrame, arms: Sequence[str], runs: int) -> str:
    lines = [
        f"{runs} runs. *Lost*: the last {outcome.WINDOW} steps earn below a quarter of the run's best and of its "
        f"control's last; *held*: at least {outcome.HELD_FROM:.0%} of the control's. A cell goes by what more than "
        "half of its runs are called."
    ]
    for arm in arms[1:] if len(cells) else ():
        own = cells.loc[cells["arm"] == arm, "verdict"]
        lines.append("")
        lines += [
            f"- {text.format(arm=arm)}: {(own == verdict).sum()} of {len(own)} cells" for verdict, text in WORDS.items()
        ]
    return "\n".join(lines)


def _matters(runs: pd.DataFrame, stage: CollapseStage) -> str:
    """The sentence on the condition whose loss leaves fewest uncorrected runs lost."""
    table = conditions_taken_away(runs, stage)
    counts = table[f"{stage.arms[0]} {LOST}"]
    every, others = counts.iloc[0], counts.iloc[1:][counts.iloc[1:] != "–"]
    if every == "–" or every.startswith("0 "):
        return "With every condition of the reference no uncorrected run is lost: there is nothing to take away."
    if others.empty:
        return "No run has all but one of the reference's conditions."
    shares = others.map(lambda text: int(text.split(" of ")[0]) / int(text.split(" of ")[1]))
    least = [table.loc[index, "condition"] for index in shares.index[shares == shares.min()]]
    return (
        f"With every condition {every} uncorrected runs are lost. Fewest, {others[shares.idxmin()]}, with this in the "
        f"place of one of them: {', '.join(least)}."
    )


def _told(found: tuple[Law, dict[str, float]] | None, arm: str) -> str:
    if found is None:
        return f"Fewer than two runs of {arm} are lost, or fewer than two are not: no law can be fitted."
    fit, alone = found
    rows = pd.DataFrame(
        [(name, f"{fit.weights[name]:+.2f}", f"{value:.2f}") for name, value in alone.items()],
        columns=["from the first five updates", "weight", "area alone"],
    )
    return (
        f"Which runs of {arm} will be lost, by a logistic regression on half of the cells: area under the curve "
        f"{fit.fitted:.2f} on these ({fit.fitted_runs} runs), {fit.other:.2f} on the other half "
        f"({fit.other_runs} runs); 0.5 is chance.\n\n{_markdown(rows)}"
    )


def _markdown(table: pd.DataFrame) -> str:
    lines = [f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in table.itertuples(index=False))])
