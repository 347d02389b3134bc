"""The runs of the studies: cells of a grid that are normal training runs under changed settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from score_centering.settings.load import resolve
from score_centering.settings.model import CacheFault, Perturbation, Settings, StaleColumn
from score_centering.settings.stages import TrainStage

STUDIES = ("faults", "sweep", "stale")
NO_FAULT = "none"
SAMPLERS = ("online", "frozen")  # of the drift study: synced every step, or fixed at the start


@dataclass(frozen=True)
class Cell:
    """One column of a study's grid: settings laid over the arm's, and what is done to the rollout engine."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    perturbation: Perturbation | None = None


def cells(settings: Settings, study: str) -> dict[str, Cell]:
    """Cells of `study` by name: precisions of the sweep, intervals of the stale samplers, kinds and rates of the faults
    with the healthy engine first.

    A cell's name is a folder's.
    """
    if study == "sweep":
        precisions = settings.sweep.precisions
        return {
            name: Cell(precisions[name].overrides, _noise(precisions[name].weight_noise))
            for name in settings.sweep.columns
        }
    if study == "stale":
        return {stale_cell(column): Cell(_stale(column)) for column in settings.stale.columns}
    faults = settings.faults
    damaged = {
        fault_cell(kind, rate): Cell(perturbation=Perturbation(cache_fault=CacheFault(rate=rate, kind=kind)))
        for kind in faults.trained_kinds
        for rate in faults.rates
    }
    return {NO_FAULT: Cell(), **damaged}


def fault_cell(kind: str, rate: float) -> str:
    """Name of the cell of one kind and rate of damage: `codes-0.01`."""
    return f"{kind}-{rate:g}"


def stale_cell(column: StaleColumn) -> str:
    """Name of the cell of one interval and number of mini-batches: `sync8`, `sync8-batches4`."""
    return f"sync{column.sync_every}" + (f"-batches{column.mini_batches}" if column.mini_batches > 1 else "")


def cell_stage(config: Mapping[str, Any], settings: Settings, study: str, cell: str, arm: str) -> TrainStage:
    """Settings of one run of a study: default < preset < arm < the study's overrides < the cell's.

    `settings` are those of `config` without an arm.
    """
    chosen = cells(settings, study)[cell]
    overlays = (getattr(settings, study).overrides, chosen.overrides)
    return TrainStage.of(resolve(config, arm=arm, overlays=overlays), chosen.perturbation)


def _stale(column: StaleColumn) -> dict[str, Any]:
    actor = {"mini_batches": column.mini_batches}
    return {"trainer": {"sync_every": column.sync_every}, "actor_rollout_ref": {"actor": actor}}


def _noise(relative: float) -> Perturbation | None:
    return Perturbation(weight_noise=relative) if relative else None


def ways_to_center(head_sizes: Sequence[int]) -> list[str]:
    """Runs of the drift study: `exact` (the whole vocabulary is recorded), `none`, and `k<K>` for each K."""
    return ["exact", "none", *(f"k{k}" for k in head_sizes)]
