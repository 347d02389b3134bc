"""Rows of parquet and JSONL files: which column holds the problem, which its answer, and what of it is the answer."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.data.problems import MALFORMED_PROMPT, RawProblem
from score_centering.data.source_answers import (
    DECODER,
    MISSING,
    UNMARKED,
    answer_of_value,
    answer_of_verification_info,
)
from score_centering.settings import UserError
from score_centering.settings.dataset_blocks import Columns

SUFFIXES = (".parquet", ".jsonl")
ANSWER, VERIFICATION = "answer", "verification_info"
IDS = ("id", "problem_id")
SOLVE_RATES = ("solve_rate", "solve_rate_qwen_r1_distill_7b")
BATCH_ROWS = 8192
# What other data sets call them, for the advice where a column is missing.
PROMPT_NAMES = ("prompt", "question", "problem", "messages", "query", "instruction")
ANSWER_NAMES = ("final_answer", "ground_truth", "expected_answer", "answer", "solution", "target", "label", "messages")
NESTED_ANSWERS = {"reward_model": "ground_truth"}  # verl's


@dataclass(frozen=True)
class Reading:
    """How rows are read. extract: the answer in a worked solution's text, or None where it marks none."""

    columns: Columns = field(default_factory=Columns)
    extract: Callable[[str], str | None] | None = None

    def pin(self) -> dict[str, Any]:
        """What of this a manifest records: nothing where nothing is configured."""
        return {} if self.columns == Columns() else {"columns": self.columns.model_dump()}


AS_NAMED = Reading()  # the columns that PrimeIntellect's math data has, or a plain `answer`


def read_rows(files: Iterable[Path], reading: Reading = AS_NAMED) -> Iterator[RawProblem]:
    """The rows of `files`, one after the other: problem and answer from the columns of `reading`; optional are `id` or
    `problem_id`, and `solve_rate` or `solve_rate_qwen_r1_distill_7b`. Other columns are ignored."""
    for file in files:
        parquet = file.suffix == ".parquet"
        records = _parquet_records(file, reading.columns) if parquet else _jsonl_records(file, reading.columns)
        for record in records:
            yield _raw_problem(record, reading)


def _raw_problem(record: Mapping[str, Any], reading: Reading) -> RawProblem:
    answer, fault = _answer(record, reading.columns.answer)
    if answer is not None and reading.extract is not None:
        answer = reading.extract(answer)
        fault = UNMARKED if answer is None else None
    _, value = _field(record, reading.columns.prompt)
    prompt = _prompt(value)
    malformed = prompt is None and value is not None
    return RawProblem(
        prompt=prompt,
        answer=answer,
        fault=MALFORMED_PROMPT if malformed else fault,
        id=next((str(record[name]) for name in IDS if record.get(name) is not None), None),
        solve_rate=next((_rate(record[name]) for name in SOLVE_RATES if record.get(name) is not None), None),
    )


def _answer(record: Mapping[str, Any], name: str | None) -> tuple[str | None, str | None]:
    """(answer, None), or (None, reason)."""
    if name == VERIFICATION or (name is None and VERIFICATION in record):
        return answer_of_verification_info(record.get(VERIFICATION))
    found, value = _field(record, name or ANSWER)
    if not found:
        return None, MISSING
    match value:
        case [*_, {"role": "assistant", "content": str() as content}]:
            return answer_of_value(content)
    return answer_of_value(value)


def _field(record: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """(True, value) of a column, or of the field b of the struct a by the name `a.b`; (False, None): none is there."""
    if name in record:
        return True, record[name]
    outer, dot, inner = name.partition(".")
    return _field(record[outer], inner) if dot and isinstance(record.get(outer), Mapping) else (False, None)


def _prompt(value: object) -> str | None:
    """The problem's text: itself, or the content of the one user message that begins a conversation, verl's form; the
    answers that follow it are no part of the problem."""
    match value:
        case str():
            return value
        case [{"role": "user", "content": str() as content}, *rest]:
            return content if all(_is_answer(message) for message in rest) else None
    return None


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _rate(value: object) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _parquet_records(file: Path, columns: Columns) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as parquet:
            names = set(parquet.schema_arrow.names)
            _require_columns(file, names, columns)
            asked = [_column(name, names) for name in (columns.prompt, columns.answer or ANSWER)]
            optional = (*(() if columns.answer else (VERIFICATION,)), *IDS, *SOLVE_RATES)
            wanted = [name for name in dict.fromkeys((*asked, *optional)) if name in names]
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                values_of = [column.to_pylist() for column in batch.columns]
                for values in zip(*values_of, strict=True):
                    yield dict(zip(batch.schema.names, values, strict=True))
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not a readable parquet file: {' '.join(str(error).split())[:200]}") from None


def _jsonl_records(file: Path, columns: Columns) -> Iterator[dict[str, Any]]:
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
        _require_columns(file, names, columns)


def _column(name: str, names: set[str]) -> str:
    """The column that `name` stands in: itself, or that of the outermost struct."""
    return name if name in names else name.partition(".")[0]


def _require_columns(file: Path, names: set[str], columns: Columns) -> None:
    """Refuse a file without the two columns: what it has instead, and the keys that name them."""
    lacking = []
    if _column(columns.prompt, names) not in names:
        lacking.append((columns.prompt, "prompt", next((name for name in PROMPT_NAMES if name in names), "…")))
    if columns.answer is None and not names & {ANSWER, VERIFICATION}:
        lacking.append((f"{VERIFICATION} or {ANSWER}", "answer", _likely_answer(names)))
    elif columns.answer is not None and _column(columns.answer, names) not in names:
        lacking.append((columns.answer, "answer", _likely_answer(names)))
    if lacking:
        found = ", ".join(sorted(names))
        faults = " and ".join(f"no column {asked}" for asked, _, _ in lacking)
        keys = " ".join(f"dataset.columns.{key}={likely}" for _, key, likely in lacking)
        raise UserError(f"{file}: {faults}, found {found}; name yours: {keys}")


def _likely_answer(names: set[str]) -> str:
    nested = (f"{outer}.{inner}" for outer, inner in NESTED_ANSWERS.items() if outer in names)
    return next((name for name in (*nested, *(name for name in ANSWER_NAMES if name in names))), "…")
