"""Training logs of any framework as one table of columns. Reads files only; writes nothing."""

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from score_centering.diagnosis.columns import STEP_NAMES, Choice, choose, framework
from score_centering.diagnosis.events import read_events
from score_centering.runs.log import read_log
from score_centering.settings import UserError

Columns = dict[str, dict[int, float]]  # column: step: value

ANSI = re.compile(r"\x1b\[[0-9;]*m")
VERL_LINE = re.compile(r"\bstep:(\d+) - (.*)")
WRAPPED = re.compile(r"^(?:np|numpy|torch)\.\w+\((.*?)(?:, dtype=.*)?\)$")
PRINTED = re.compile(r"\{['\"].*\}")
STEP_BEFORE = re.compile(r"\b(?:step|rollout|perf|eval)[ =](\d+)\b")
BAR_LINE = re.compile(r"\bStep (\d+) \| (.*)")
BAR_NUMBER = re.compile(r"^([A-Z][\w. ]*?): *([-+]?[\d.]+(?:[eE][-+]?\d+)?)\b")
RUN_KEYS = (("run",), ("run_name",), ("cell", "arm", "seed"), ("arm", "seed"))  # text that tells runs of a table apart
WANDB_RANGE = re.compile(r"__(?:MIN|MAX|STEP)$| - _(?:step|runtime|timestamp)$")


@dataclass(frozen=True)
class Series:
    """One quantity over the steps at which it was logged; NaN and infinity are kept."""

    steps: np.ndarray  # (S,) int64, rising
    values: np.ndarray  # (S,) float64

    def until(self, step: float) -> "Series":
        keep = self.steps <= step
        return Series(self.steps[keep], self.values[keep])


@dataclass(frozen=True)
class Log:
    """One training run as its log tells it."""

    name: str
    series: dict[str, Series]  # by quantity of `columns.QUANTITIES`
    choices: dict[str, Choice] = field(default_factory=dict)
    framework: str = "unknown"
    unused: tuple[str, ...] = ()
    corrections: str = "unknown"  # what the objective does about the mismatch, where the run's settings tell

    def get(self, quantity: str) -> Series | None:
        return self.series.get(quantity)

    @property
    def last_step(self) -> int:
        return max((int(series.steps[-1]) for series in self.series.values() if len(series.steps)), default=0)

    def until(self, step: float) -> "Log":
        """The log as it stood after `step`."""
        cut = {name: series.until(step) for name, series in self.series.items()}
        return Log(
            self.name,
            {name: series for name, series in cut.items() if len(series.steps)},
            self.choices,
            self.framework,
            self.unused,
            self.corrections,
        )


def read(path: str | Path, overrides: Mapping[str, str] | None = None) -> list[Log]:
    """The runs of a log: one for a file or the folder of a run; an experiment or a table of several gives one each.

    Args:
        overrides: quantity to the column that it is to be read from; the others are chosen by the known names.

    Raises:
        UserError: one line: no such file, no format that is known, no steps, or no known column.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_dir() and (inner := _runs_below(path)):
        return [log for folder in inner for log in read(folder, overrides)]
    runs = {"": _folder(path)} if path.is_dir() else _file(path)
    runs = {run: columns for run, columns in runs.items() if any(columns.values())}
    if not runs:
        raise UserError(f"{path}: holds no step with a number; see --help for the formats that are read")
    logs = [make_log(f"{path}: {run}" if run else str(path), columns, overrides) for run, columns in runs.items()]
    return [replace(log, corrections=_settings(path)) for log in logs]


def _runs_below(path: Path) -> list[Path]:
    """The runs of one of our experiments; the folders of TensorBoard files, where there are several: each is a run."""
    ours = [
        folder
        for folder in sorted(path.glob("runs/*/seed*"))
        if (folder / "metrics.parquet").is_file() or (folder / "state" / "steps.log").is_file()
    ]
    events = sorted({file.parent for file in path.glob("**/events.out.tfevents*")})
    return ours or (events if len(events) > 1 else [])


def _settings(path: Path) -> str:
    """Corrections of one of our runs: from state/identity.json or config.yaml of its folder."""
    folder = path if path.is_dir() else path.parent
    if not any((folder / name).is_file() for name in ("metrics.parquet", "state/steps.log")):
        return "unknown"  # another framework's folder
    for file in (folder / "state" / "identity.json", folder / "config.yaml"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            try:
                content = json.loads(text)["config"] if file.suffix == ".json" else yaml.safe_load(text)
            except (ValueError, KeyError, yaml.YAMLError):
                raise UserError(f"{file}: not the settings of a run; move it away to diagnose without it") from None
            chosen = content.get("score_centering") if isinstance(content, dict) else None
            if isinstance(chosen, dict) and "centering" in chosen:
                weighted = chosen.get("is_mode", "none") not in ("none", None)
                return {
                    (True, True): "both",
                    (True, False): "centering",
                    (False, True): "weights",
                    (False, False): "none",
                }[bool(chosen["centering"]), weighted]
    return "unknown"


def make_log(name: str, columns: Columns, overrides: Mapping[str, str] | None = None) -> Log:
    choices = choose(columns, overrides)
    if not choices:
        shown = ", ".join(sorted(columns)[:12]) or "none"
        raise UserError(f"{name}: no column with a known name; name one with --column reward=…; the log has {shown}")
    series = {}
    for quantity, choice in choices.items():
        points = sorted(columns[choice.column].items())
        values = np.array([value for _, value in points], np.float64) + choice.shift
        series[quantity] = Series(np.array([step for step, _ in points], np.int64), values)
    used = {choice.column for choice in choices.values()}
    unused = tuple(sorted(column for column in columns if column not in used))
    return Log(name, series, choices, framework(choices), unused)


def _folder(path: Path) -> Columns:
    """Our run folder, else a trainer state, else event files, else logs of lines: the first kind that is there."""
    if (path / "metrics.parquet").is_file():
        return _one(_parquet(path / "metrics.parquet"), path)
    if (path / "state" / "steps.log").is_file():
        records = read_log(path / "state" / "steps.log")
        return _from_rows([{"step": record["step"], **record["metrics"]} for record in records], path)
    states = sorted(path.glob("**/trainer_state.json"), key=lambda file: (file.stat().st_mtime, str(file)))
    if states:
        return _one(_json(states[-1]), path)  # the last checkpoint's history holds those before it
    for pattern in ("**/events.out.tfevents*", "**/metrics.jsonl", "**/*.jsonl", "**/*.log"):
        files = sorted(path.glob(pattern), key=lambda file: (file.stat().st_mtime, str(file)))
        if files:
            return _joined(_one(_file(file), file) for file in files)  # pieces of a resumed run, or its processes
    raise UserError(f"{path}: a folder without metrics.parquet, trainer_state.json, event files, *.jsonl or *.log")


def _one(runs: dict[str, Columns], path: Path) -> Columns:
    if len(runs) > 1:
        raise UserError(f"{path}: a table of several runs ({', '.join(runs)}); give the file, not its folder")
    return next(iter(runs.values()), {})


def _file(path: Path) -> dict[str, Columns]:
    """Run to columns; "" where the file holds one run and doesn't name it."""
    if "tfevents" in path.name:
        columns: Columns = {}
        for step, tag, value in read_events(path):
            columns.setdefault(tag, {})[step] = value
        return {"": columns}
    readers: dict[str, Callable[[Path], dict[str, Columns]]] = {
        ".parquet": _parquet,
        ".csv": _csv,
        ".json": _json,
        ".jsonl": _jsonl,
    }
    return readers.get(path.suffix, _text)(path)


def _parquet(path: Path) -> dict[str, Columns]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {' '.join(str(error).split())[:160]}") from None
    return _by_run(table.to_pylist(), path)


def _csv(path: Path) -> dict[str, Columns]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name and not WANDB_RANGE.search(name)]
    runs = list(dict.fromkeys(name.split(" - ", 1)[0] for name in names if " - " in name))
    if not runs:
        return _by_run(rows, path)
    return {  # a chart exported from W&B: "<run> - <metric>", with its __MIN and __MAX
        run if len(runs) > 1 else "": _from_rows(
            [
                {name.removeprefix(f"{run} - "): row[name] for name in names if name.startswith(f"{run} - ")}
                | {name: row[name] for name in names if name in STEP_NAMES}
                for row in rows
            ],
            path,
        )
        for run in runs
    }


def _by_run(rows: list[Mapping[str, Any]], path: Path) -> dict[str, Columns]:
    """A table with a column `run`, or with `arm` and `seed`, is one of several runs."""
    first = rows[0] if rows else {}
    keys = next((keys for keys in RUN_KEYS if all(key in first for key in keys)), ())
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(" ".join(str(row[key]) for key in keys), []).append(row)
    return {run if len(runs) > 1 else "": _from_rows(part, path) for run, part in runs.items()}


def _json(path: Path) -> dict[str, Columns]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):  # transformers' Trainer
        return {"": _from_rows(content["log_history"], path)}
    if isinstance(content, list):
        return {"": _from_rows(content, path)}
    if isinstance(content, dict) and content and all(isinstance(value, dict) for value in content.values()):
        columns = {  # NeMo-RL: metric: step: value
            name: {int(step): number for step, value in steps.items() if (number := _number(value)) is not None}
            for name, steps in content.items()
            if all(str(step).isdigit() for step in steps)
        }
        return {"": columns}
    raise UserError(f"{path}: JSON of no known shape: a trainer_state.json, a list of rows, or metric: step: value")


def _jsonl(path: Path) -> dict[str, Columns]:
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # torn by a writer that still runs
                break
            raise UserError(f"{path}: line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is no JSON object")
        rows.append({"step": row["step"], **row["data"]} if isinstance(row.get("data"), dict) else row)  # verl
    return _by_run(rows, path)


def _text(path: Path) -> dict[str, Columns]:
    """Console output: verl's `step:n - name:value`, printed dictionaries, and prime-rl's `Step n | Name: value`."""
    columns: Columns = {}
    step = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for raw in file:
            line = ANSI.sub("", raw).rstrip()
            if match := VERL_LINE.search(line):
                pairs = (part.rpartition(":") for part in match[2].split(" - "))
                _add(columns, int(match[1]), {name: value for name, _, value in pairs})
            elif match := BAR_LINE.search(line):
                parts = (BAR_NUMBER.match(part.strip()) for part in match[2].split("|"))
                _add(columns, int(match[1]), {part[1]: part[2] for part in parts if part})
            elif (match := PRINTED.search(line)) and (row := _literal(match[0])) is not None:
                named, before = _step(row), STEP_BEFORE.findall(line[: match.start()])
                step = named if named is not None else int(before[-1]) if before else step
                if step is not None:
                    _add(columns, step, row)
    return {"": columns}


def _literal(text: str) -> dict[str, Any] | None:
    """The dictionary that a program printed; None where it is none."""
    text = re.sub(r"\b(?:np|numpy)\.\w+\(([^()]*)\)", r"\1", text)
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _from_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Columns:
    """Rows of a table. One without a step belongs to the step before it; where none names a step, each is one."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(f"{path}: row {number} is no record of named values")
    named = [_step(row) for row in rows]
    if all(step is None for step in named):
        named = list(range(1, len(rows) + 1))
    columns: Columns = {}
    last = None
    for row, step in zip(rows, named, strict=True):
        last = last if step is None else step
        if last is not None:
            _add(columns, last, row)
    return columns


def _step(row: Mapping[str, Any]) -> int | None:
    for name in STEP_NAMES:
        if (value := _number(row.get(name))) is not None and math.isfinite(value):
            return int(value)
    return None


def _add(columns: Columns, step: int, row: Mapping[str, Any]) -> None:
    """The later of two values of one step wins: a resumed run repeats steps."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            _add(columns, step, {f"{name}/{inner}": number for inner, number in value.items()})
        elif name and name not in STEP_NAMES and (number := _number(value)) is not None:
            columns.setdefault(str(name), {})[step] = number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value.strip():
        text = value.strip()
        text = match[1] if (match := WRAPPED.match(text)) else text
        try:
            return float(text)
        except ValueError:
            return None
    return None


def _joined(parts: Iterable[Columns]) -> Columns:
    result: Columns = {}
    for part in parts:
        for name, points in part.items():
            result.setdefault(name, {}).update(points)
    return result
