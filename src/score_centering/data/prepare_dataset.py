"""From rows of a source to two disjoint splits on disk.

Every step depends on the *set* of rows, never on their order: a problem's place in the splits is the hash of the seed
and its normalised prompt.
"""

import hashlib
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.data.dataset_manifest import SCHEMA_VERSION, TABLE_SCHEMA, Manifest, is_prepared, read_table
from score_centering.data.local_files import open_local
from score_centering.data.problems import MALFORMED_PROMPT, Problem, RawProblem, normalise_prompt
from score_centering.data.source import Source
from score_centering.data.source_answers import MALFORMED
from score_centering.data.tables import Reading
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file

MISSING_PROMPT = "missing_prompt"
UNPARSABLE = "unparsable_answer"
DUPLICATE = "duplicate"
CONFLICTING = "conflicting_answers"
SOLVE_RATE_MISSING = "solve_rate_missing"
SOLVE_RATE_BELOW = "solve_rate_below_min"
SOLVE_RATE_ABOVE = "solve_rate_above_max"
OVER_TRAIN_SIZE = "over_train_size"

MAX_UNPARSABLE_SHARE = 0.05  # above it the source's answers are no math answers, and dropping them would hide that
ROW_GROUP_SIZE = 10_000


@dataclass(frozen=True)
class Prepared:
    """Both splits, in file order, and how many rows were read and dropped, by reason."""

    train: list[Problem]
    test: list[Problem]
    rows_read: int
    dropped: dict[str, int]


def prepare(
    source: Source,
    *,
    val_size: int,
    seed: int,
    train_size: int | None = None,
    min_solve_rate: float | None = None,
    max_solve_rate: float | None = None,
    parsable: Callable[[Sequence[str]], Sequence[bool]],
) -> Prepared:
    """Drop what cannot be trained on, count it by reason, and split the rest.

    `parsable` says of each answer whether the scorer can compare with it. The first `val_size` problems in the order
    of the split's hash become the test split, the next `train_size` (default: all) the training split.
    """
    problems, rows_read, dropped = _checked(source, seed, min_solve_rate, max_solve_rate, parsable)
    if len(problems) <= val_size:
        raise UserError(
            f"dataset.val_size: {val_size} leaves no training problem of the {len(problems)} that {source.name} gives "
            f"({rows_read} rows, dropped: {dict(sorted(dropped.items()))})"
        )
    if train_size is not None and len(problems) > val_size + train_size:
        dropped[OVER_TRAIN_SIZE] = len(problems) - val_size - train_size
        del problems[val_size + train_size :]
    return Prepared(problems[val_size:], problems[:val_size], rows_read, dict(sorted(dropped.items())))


def read_problems(
    path: Path, reading: Reading, *, seed: int, parsable: Callable[[Sequence[str]], Sequence[bool]]
) -> tuple[list[Problem], dict[str, int]]:
    """The problems of one file, and how many rows were dropped, by reason. A prepared split is read as it is, rows of
    any other parquet or JSONL file are checked as `prepare` does and put in the order of the split's hash."""
    if is_prepared(path):
        return read_table(path), {}
    source = open_local(str(path), reading, key="--train-file or --val-file")
    problems, rows_read, dropped = _checked(source, seed, None, None, parsable)
    if not problems:
        raise UserError(f"{path}: none of its {rows_read} rows is a problem (dropped: {dict(sorted(dropped.items()))})")
    return problems, dict(sorted(dropped.items()))


def _checked(
    source: Source,
    seed: int,
    min_solve_rate: float | None,
    max_solve_rate: float | None,
    parsable: Callable[[Sequence[str]], Sequence[bool]],
) -> tuple[list[Problem], int, Counter[str]]:
    """The problems that can be trained on in the order of the split's hash, rows read, rows dropped by reason."""
    dropped: Counter[str] = Counter()
    kept: dict[bytes, RawProblem] = {}
    conflicting: set[bytes] = set()
    rows_read = 0
    for row in source.rows:
        rows_read += 1
        reason = _fault(row, min_solve_rate, max_solve_rate)
        if reason is not None:
            dropped[reason] += 1
            continue
        key = hashlib.sha256(normalise_prompt(row.prompt).encode()).digest()
        other = kept.setdefault(key, row)
        if other is row:
            continue
        dropped[DUPLICATE] += 1
        if " ".join(other.answer.split()) != " ".join(row.answer.split()):
            conflicting.add(key)
        if _preference(row) < _preference(other):
            kept[key] = row
    for key in conflicting:
        del kept[key]
    if conflicting:
        dropped[CONFLICTING] = len(conflicting)
    _drop_unparsable(kept, parsable, dropped, source.name)
    order = sorted(kept, key=lambda key: _split_hash(seed, key))
    return [_problem(kept[key], key, source.name) for key in order], rows_read, dropped


def _fault(row: RawProblem, min_solve_rate: float | None, max_solve_rate: float | None) -> str | None:
    if row.prompt is None or not row.prompt.strip():
        return MALFORMED_PROMPT if row.fault == MALFORMED_PROMPT else MISSING_PROMPT
    if row.fault is not None:
        return row.fault
    if not _is_unicode(row.prompt):
        return MALFORMED_PROMPT
    if not _is_unicode(row.answer):
        return MALFORMED
    if min_solve_rate is None and max_solve_rate is None:
        return None
    if row.solve_rate is None or math.isnan(row.solve_rate):
        return SOLVE_RATE_MISSING
    if min_solve_rate is not None and row.solve_rate < min_solve_rate:
        return SOLVE_RATE_BELOW
    if max_solve_rate is not None and row.solve_rate > max_solve_rate:
        return SOLVE_RATE_ABOVE
    return None


def _is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; half a surrogate pair, which JSON allows, cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _preference(row: RawProblem) -> tuple[str, str, str]:
    """Which of two rows of one problem is kept: the smallest, whatever came first."""
    return row.id or "", row.prompt or "", row.answer or ""


def _drop_unparsable(
    kept: dict[bytes, RawProblem],
    parsable: Callable[[Sequence[str]], Sequence[bool]],
    dropped: Counter[str],
    source_name: str,
) -> None:
    answers = sorted({row.answer for row in kept.values()})
    unparsable = {answer for answer, good in zip(answers, parsable(answers), strict=True) if not good}
    keys = [key for key, row in kept.items() if row.answer in unparsable]
    if not keys:
        return
    if len(keys) > MAX_UNPARSABLE_SHARE * len(kept):
        examples = ", ".join(repr(answer[:60]) for answer in sorted(unparsable)[:3])
        raise UserError(
            f"{source_name}: {len(keys)} of {len(kept)} answers are no math that the scorer can compare with "
            f"(allowed: {MAX_UNPARSABLE_SHARE:.0%}), e.g. {examples}; where they are worked solutions, "
            "dataset.columns.extract takes their answer: hashes (`#### x`) or boxed"
        )
    dropped[UNPARSABLE] = len(keys)
    for key in keys:
        del kept[key]


def _split_hash(seed: int, key: bytes) -> bytes:
    return hashlib.sha256(b"%d\0%b" % (seed, key)).digest()


def _problem(row: RawProblem, key: bytes, source_name: str) -> Problem:
    return Problem(row.prompt, row.answer, row.id or key.hex()[:16], source_name)


def write_dataset(prepared: Prepared, source: Source, output_dir: str | os.PathLike[str], split: dict) -> Manifest:
    """Write train.parquet, test.parquet and, last, manifest.json; each replaces its predecessor in one step.

    `split` is recorded in the manifest as it is.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, problems in (("train.parquet", prepared.train), ("test.parquet", prepared.test)):
        temporary = folder / f".{name}.{os.getpid()}"
        _write_table(problems, temporary)
        files[name] = {"sha256": sha256_file(temporary), "rows": len(problems)}
        os.replace(temporary, folder / name)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        source={"name": source.name, **source.pin},
        source_files=dict(sorted(source.files.items())),
        files=files,
        rows_read=prepared.rows_read,
        dropped=prepared.dropped,
        split=split,
        versions={"pyarrow": pa.__version__, "python": platform.python_version()},
    )
    temporary = folder / f".manifest.json.{os.getpid()}"
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    os.replace(temporary, folder / "manifest.json")
    return manifest


def _write_table(problems: Iterable[Problem], path: Path) -> None:
    columns = list(zip(*problems, strict=True)) or [()] * len(TABLE_SCHEMA)
    table = pa.table([pa.array(column, pa.string()) for column in columns], schema=TABLE_SCHEMA)
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_SIZE)
