"""Rows of parquet and JSONL files with the columns of PrimeIntellect's math data, or with a plain `answer` column."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.data.problems import MALFORMED_PROMPT, RawProblem
from score_centering.data.source_answers import DECODER, MISSING, answer_of_value, answer_of_verification_info
from score_centering.settings import UserError

SUFFIXES = (".parquet", ".jsonl")
PROMPT, ANSWER, VERIFICATION = "prompt", "answer", "verification_info"
IDS = ("id", "problem_id")
SOLVE_RATES = ("solve_rate", "solve_rate_qwen_r1_distill_7b")
BATCH_ROWS = 8192


def read_rows(files: Iterable[Path]) -> Iterator[RawProblem]:
    """The rows of `files`, one after the other. Columns: `prompt`, and `verification_info` or `answer`; optional are
    `id` or `problem_id`, and `solve_rate` or `solve_rate_qwen_r1_distill_7b`. Other columns are ignored."""
    for file in files:
        records = _parquet_records(file) if file.suffix == ".parquet" else _jsonl_records(file)
        for record in records:
            yield _raw_problem(record)


def _raw_problem(record: dict[str, Any]) -> RawProblem:
    if VERIFICATION in record:
        answer, fault = answer_of_verification_info(record[VERIFICATION])
    elif ANSWER in record:
        answer, fault = answer_of_value(record[ANSWER])
    else:
        answer, fault = None, MISSING
    prompt = _prompt(record.get(PROMPT))
    malformed = prompt is None and record.get(PROMPT) is not None
    return RawProblem(
        prompt=prompt,
        answer=answer,
        fault=MALFORMED_PROMPT if malformed else fault,
        id=next((str(record[name]) for name in IDS if record.get(name) is not None), None),
        solve_rate=next((_rate(record[name]) for name in SOLVE_RATES if record.get(name) is not None), None),
    )


def _prompt(value: object) -> str | None:
    """The problem's text: itself, or the content of the one user message of a conversation, verl's form."""
    match value:
        case str():
            return value
        case [{"role": "user", "content": str() as content}]:
            return content
    return None


def _rate(value: object) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _parquet_records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as parquet:
            names = set(parquet.schema_arrow.names)
            _require_columns(file, names)
            wanted = [name for name in (PROMPT, ANSWER, VERIFICATION, *IDS, *SOLVE_RATES) if name in names]
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                columns = [column.to_pylist() for column in batch.columns]
                for values in zip(*columns, strict=True):
                    yield dict(zip(batch.schema.names, values, strict=True))
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not a readable parquet file: {' '.join(str(error).split())[:200]}") from None


def _jsonl_records(file: Path) -> Iterator[dict[str, Any]]:
    names: set[str] = set()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = DECODER.decode(line.decode())
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}:{number}: not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{file}:{number}: a JSON object is needed, found {json.dumps(record)[:60]}")
            names |= record.keys()
            yield record
    if names:  # of all lines: a single one may lack a column
        _require_columns(file, names)


def _require_columns(file: Path, names: set[str]) -> None:
    if PROMPT not in names or not names & {ANSWER, VERIFICATION}:
        found = ", ".join(sorted(names))
        raise UserError(f"{file}: needs the columns {PROMPT} and {VERIFICATION} or {ANSWER}, found {found}")
