"""The runs of the studies: cells of a grid that are normal training runs under changed settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any

from score_centering.settings.load import resolve
from score_centering.settings.model import Settings
from score_centering.settings.stages import ModelStage, TrainStage
from score_centering.settings.study_blocks import (
    CacheFault,
    Collapse,
    CollapseGrid,
    Conditions,
    Perturbation,
    StaleColumn,
)

STUDIES = ("faults", "sweep", "stale", "collapse")
NO_FAULT = "none"
SAMPLERS = ("online", "frozen")  # of the drift study: synced every step, or fixed at the start


@dataclass(frozen=True)
class Cell:
    """One cell of a study's grid, for every arm.

    overlays: settings laid over the arm's, one after the other.  of_arm: further ones of single arms.  perturbation:
    what is done to the rollout engine, in the place of what the settings say.  entropy: whose model the runs start
    from, an entry of `collapse.entropies` that changes it; None: the experiment's.
    """

    overlays: Sequence[Mapping[str, Any]] = ()
    of_arm: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    perturbation: Perturbation | None = None
    entropy: str | None = None


def cells(settings: Settings, study: str) -> dict[str, Cell]:
    """Cells of `study` by name: precisions of the sweep, intervals of the stale samplers, conditions of the map of the
    collapse, kinds and rates of the faults with the healthy engine first.

    A cell's name is a folder's.
    """
    if study == "sweep":
        precisions = settings.sweep.precisions
        return {
            name: Cell((precisions[name].overrides,), perturbation=_noise(precisions[name].weight_noise))
            for name in settings.sweep.columns
        }
    if study == "stale":
        return {stale_cell(column): Cell((_stale(column),)) for column in settings.stale.columns}
    if study == "collapse":
        return {
            collapse_cell(conditions): _collapse(settings.collapse, conditions)
            for conditions in conditions_of(settings.collapse.grid)
        }
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


def conditions_of(grid: CollapseGrid) -> list[Conditions]:
    """Every cell of the map, in the order of its lists."""
    axes = product(grid.precisions, grid.rates, grid.entropies, grid.bounds)
    return [Conditions(precision=p, rate=r, entropy=e, bound=b) for p, r, e, b in axes]


def collapse_cell(conditions: Conditions) -> str:
    """Name of a cell of the map: `noise0.3+1.5+filler+clip`. No name of an axis holds a plus."""
    return f"{conditions.precision}+{conditions.rate:g}+{conditions.entropy}+{conditions.bound}"


def model_folder(results: str, entropy: str | None) -> str:
    """The folder below which the model of a cell lies, for `Cell.entropy`."""
    return results if entropy is None else f"{results}/collapse/entropies/{entropy}"


def entropy_model_stage(config: Mapping[str, Any], settings: Settings, entropy: str) -> ModelStage:
    """Settings of the model that runs of this entropy start from."""
    return ModelStage.of(resolve(config, overlays=(settings.collapse.entropies[entropy],)))


def cell_stage(config: Mapping[str, Any], settings: Settings, study: str, cell: str, arm: str) -> TrainStage:
    """Settings of one run of a study: default < preset < arm < the study's overrides < the cell's.

    `settings` are those of `config` without an arm.
    """
    chosen = cells(settings, study)[cell]
    overlays = (getattr(settings, study).overrides, *chosen.overlays, chosen.of_arm.get(arm, {}))
    return TrainStage.of(resolve(config, arm=arm, overlays=overlays), chosen.perturbation)


def _stale(column: StaleColumn) -> dict[str, Any]:
    actor = {"mini_batches": column.mini_batches}
    return {"trainer": {"sync_every": column.sync_every}, "actor_rollout_ref": {"actor": actor}}


def _collapse(collapse: Collapse, conditions: Conditions) -> Cell:
    bound, entropy = collapse.bounds[conditions.bound], collapse.entropies[conditions.entropy]
    rate = {"actor_rollout_ref": {"actor": {"optim": {"lr": bound.lr * conditions.rate}}}}
    return Cell(
        ({"perturbation": None}, collapse.precisions[conditions.precision], entropy, bound.overrides, rate),
        of_arm={collapse.arms[0]: bound.uncorrected},
        entropy=conditions.entropy if entropy else None,
    )


def _noise(relative: float) -> Perturbation | None:
    return Perturbation(weight_noise=relative) if relative else None


def ways_to_center(head_sizes: Sequence[int]) -> list[str]:
    """Runs of the drift study: `exact` (the whole vocabulary is recorded), `none`, and `k<K>` for each K."""
    return ["exact", "none", *(f"k{k}" for k in head_sizes)]
