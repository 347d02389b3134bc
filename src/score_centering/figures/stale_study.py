"""Stale samplers: updates between two hand-overs of the weights, against arm, as one table and one heat map."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from matplotlib.figure import Figure

from score_centering.figures.scan import read_run, run_config, scan_table
from score_centering.figures.series import WINDOW
from score_centering.figures.sweep_study import heat_map


def stale_table(runs: Sequence[Path]) -> pa.Table:
    """One row a run, in the order given: its interval and mini-batches, by what run.json says it was trained with."""
    return scan_table([read_run(run, _labels(run)) for run in runs])


def draw_stale(table: pa.Table) -> Figure:
    """The heat map of the trained weights' own reward, since a stale sampler's rollouts tell of older ones; of the
    rollouts where no run measured it."""
    runs = table.to_pandas()
    cells = list(zip(runs["sync_every"].astype(int), runs["mini_batches"].astype(int), strict=True))
    runs["cell"] = [_label(*cell) for cell in cells]
    names = {label: label for label in dict.fromkeys(runs["cell"])}
    steps, explained = int(runs["steps"].max()), "by updates between two syncs"
    if runs["clean_reward_last"].notna().any():
        title = f"Reward of the trained weights in BF16 after {steps} steps"
        return heat_map(runs, "cell", names, "clean_reward_last", title, explained)
    title = f"Mean reward of the last {min(WINDOW, steps)} of {steps} steps"
    return heat_map(runs, "cell", names, "reward_last", title, explained)


def _labels(run: Path) -> dict[str, int]:
    config = run_config(run)
    actor = config["actor_rollout_ref"]["actor"]
    return {"sync_every": config["trainer"]["sync_every"], "mini_batches": actor["mini_batches"]}


def _label(sync_every: int, mini_batches: int) -> str:
    return f"{sync_every}" + (f", {mini_batches} batches" if mini_batches > 1 else "")
