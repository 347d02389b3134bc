"""Reads the finished runs of one experiment: parquet, and what run.json says of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from score_centering.figures.arms import ArmStyle, in_order, styles
from score_centering.figures.series import WINDOW
from score_centering.runs import schema
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json


@dataclass(frozen=True)
class Run:
    """One finished training run. Columns are (S,) float64, NaN where a value was not measured at that step."""

    experiment: str
    arm: str
    seed: int
    folder: Path
    metrics: dict[str, np.ndarray]
    timing: dict[str, np.ndarray]

    @property
    def steps(self) -> np.ndarray:
        return self.metrics["step"]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the run the one that it is, by its run.json; `config` holds its settings."""
        return read_json(self.folder / "run.json")["identity"]

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the run was made and from which sources, by its run.json; empty in one of before that was recorded."""
        return read_json(self.folder / "run.json").get("provenance", {})

    @property
    def started(self) -> datetime:
        """When its first recorded step began, UTC."""
        return schema.read_timing(self.folder / "timing.parquet")["started_at"][0].as_py()


@dataclass(frozen=True)
class Experiment:
    name: str
    folder: Path
    runs: tuple[Run, ...]  # arm by arm, then by seed
    smoothing: int  # steps of the trailing mean that the figures draw
    control: str | None = None  # the arm without mismatch, if it was run
    labels: Mapping[str, str] = field(default_factory=dict)  # of arms that the configuration calls otherwise

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def looks(self) -> dict[str, ArmStyle]:
        return styles(self.arms, self.control, self.labels)

    def of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]


def read_experiment(
    folder: Path,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    smoothing: int = WINDOW,
    control: str | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """The runs of `arms` and `seeds` below `folder`/runs; without them, of every arm and seed that has a folder there.

    control: the arm of that role (`run.control`), where it is among them.  labels: `arms.<arm>.label`, where set.

    Errors: a run that is asked for, or whose folder exists, but which has no metrics.parquet or timing.parquet.
    """
    runs_folder = Path(folder) / "runs"
    if not runs_folder.is_dir():
        raise UserError(f"{runs_folder}: no such folder; give the folder of one experiment, such as results/tiny")
    found = [path.name for path in runs_folder.iterdir() if path.is_dir()]
    runs = [
        _read_run(runs_folder / arm / f"seed{seed}", arm, seed)
        for arm in (arms or in_order(found, control))
        for seed in (seeds or _seeds_in(runs_folder / arm))
    ]
    if not runs:
        raise UserError(f"{runs_folder}: holds no run; expected <arm>/seed<k>/metrics.parquet")
    present = control if any(run.arm == control for run in runs) else None
    return Experiment(runs[0].experiment, Path(folder), tuple(runs), smoothing, present, labels)


def _seeds_in(arm_folder: Path) -> list[int]:
    if not arm_folder.is_dir():
        raise UserError(f"{arm_folder}: this arm has no run; train it first")
    seeds = sorted(
        int(match.group(1)) for path in arm_folder.iterdir() if (match := re.fullmatch(r"seed(\d+)", path.name))
    )
    if not seeds:
        raise UserError(f"{arm_folder}: holds no seed<k> folder; train this arm first")
    return seeds


def _read_run(folder: Path, arm: str, seed: int) -> Run:
    for name in ("metrics.parquet", "timing.parquet"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; arm {arm}, seed {seed} has not finished training")
    metrics = schema.read_metrics(folder / "metrics.parquet")
    timing = schema.read_timing(folder / "timing.parquet")
    for name, table in (("metrics.parquet", metrics), ("timing.parquet", timing)):
        written = {key: table.schema.metadata[key.encode()].decode() for key in ("arm", "seed")}
        if written != {"arm": arm, "seed": str(seed)}:
            raise UserError(f"{folder / name}: was written by arm {written['arm']}, seed {written['seed']}")
        if table.num_rows == 0:
            raise UserError(f"{folder / name}: has no step; at least one is needed")
    experiment = metrics.schema.metadata[b"experiment"].decode()
    return Run(experiment, arm, seed, folder, _columns(metrics), _columns(timing))


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    """Every numeric column as float64 with NaN for null."""
    return {
        name: np.array(table[name].cast(pa.float64()).to_pylist(), dtype=np.float64)
        for name, kind in zip(table.column_names, table.schema.types, strict=True)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind)
    }
