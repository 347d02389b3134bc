"""Data of one's own: named columns, conversations, worked solutions, structs, and raw files instead of a split."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from score_centering.data import Reading, load_manifest, open_source, prepare, read_problems, write_dataset
from score_centering.reward.extraction import reading_of
from score_centering.settings import UserError
from score_centering.settings.dataset_blocks import Columns

USER = {"role": "user", "content": "What is 6*7?"}
SOLVED = [USER, {"role": "assistant", "content": "Six sevens.\n#### 42"}]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def reading(**columns):
    return reading_of(Columns(**columns))


def rows_of(path, **columns):
    return [
        (r.prompt, r.answer, r.fault) for r in open_source("local", {"path": str(path)}, 0, reading(**columns)).rows
    ]


def all_parsable(answers):
    return [True] * len(answers)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"question": "6*7?", "final": "42"}, {"prompt": "question", "answer": "final"}, ("6*7?", "42", None)),
        (
            {"question": "6*7?", "answer": "7+7=14\n#### 1,042 \nwell"},
            {"prompt": "question", "extract": "hashes"},
            ("6*7?", "1,042", None),
        ),
        (
            {"problem": "6*7?", "solution": r"so \boxed{41} no, \boxed{\frac{84}{2}}."},
            {"prompt": "problem", "answer": "solution", "extract": "boxed"},
            ("6*7?", r"\frac{84}{2}", None),
        ),
        ({"problem": "a", "solution": "42"}, {"prompt": "problem", "answer": "solution", "extract": "boxed"},
         ("a", None, "unmarked_answer")),
        ({"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "42"}},
         {"answer": "reward_model.ground_truth"}, ("What is 6*7?", "42", None)),
        ({"prompt": "a", "reward_model": {"style": "rule"}}, {"answer": "reward_model.ground_truth"},
         ("a", None, "missing_answer")),
        ({"messages": SOLVED}, {"prompt": "messages", "answer": "messages", "extract": "hashes"},
         ("What is 6*7?", "42", None)),
        ({"messages": [*SOLVED, USER], "a": "1"}, {"prompt": "messages", "answer": "a"},
         (None, "1", "malformed_prompt")),
    ],
)  # fmt: skip
def test_problem_and_answer_come_from_the_columns_that_are_named(tmp_path, kind, row, columns, expected):
    assert rows_of(write(tmp_path / f"rows.{kind}", [row]), **columns) == [expected]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"text": "a", "x": "1"}, {}, "prompt=… dataset.columns.answer=…"),
        ({"prompt": "a", "reward_model": {"ground_truth": "1"}}, {}, "yours: dataset.columns.answer=reward_model.gr"),
        ({"prompt": "a", "solution": "1"}, {"answer": "soluton"}, "no column soluton, found prompt, solution; name yo"),
        ({"problem": "a", "answer": "1"}, {"prompt": "question"}, "yours: dataset.columns.prompt=problem"),
    ],
)
def test_a_missing_column_names_file_columns_and_key(tmp_path, kind, row, columns, message):
    path = write(tmp_path / f"rows.{kind}", [row])
    with pytest.raises(UserError) as error:
        rows_of(path, **columns)
    assert str(error.value).startswith(f"{path}: no column ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_worked_solutions_that_nothing_takes_apart_are_told_the_key(tmp_path):
    source = open_source("local", {"path": str(write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "so 1"}]))}, 0)
    with pytest.raises(UserError, match=r"dataset\.columns\.extract takes their answer"):
        prepare(source, val_size=1, seed=0, parsable=lambda answers: [False] * len(answers))


def test_the_manifest_records_the_columns(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"q": str(i), "a": f"#### {i}"} for i in range(4)])
    source = open_source("local", {"path": str(path)}, 0, reading(prompt="q", answer="a", extract="hashes"))
    split = {"val_size": 1, "seed": 0}
    write_dataset(prepare(source, parsable=all_parsable, **split), source, tmp_path / "out", split)
    recorded = load_manifest(tmp_path / "out/manifest.json").source
    assert recorded["columns"] == {"prompt": "q", "answer": "a", "extract": "hashes"}


def test_a_raw_file_is_checked_and_ordered_whatever_the_order_of_its_rows(tmp_path):
    rows = [{"q": f"{i}?", "a": f"#### {i}"} for i in range(9)] + [
        {"q": "0? ", "a": "#### 0"},
        {"q": "", "a": "#### 1"},
    ]
    given = reading(prompt="q", answer="a", extract="hashes")
    results = []
    for name, order in (("a.jsonl", rows), ("b.parquet", rows[::-1])):
        problems, dropped = read_problems(write(tmp_path / name, order), given, seed=3, parsable=all_parsable)
        assert dropped == {"duplicate": 1, "missing_prompt": 1}
        results.append([(problem.prompt.strip(), problem.answer) for problem in problems])
    assert results[0] == results[1]
    assert sorted(results[0]) == [(f"{i}?", str(i)) for i in range(9)]


def test_a_prepared_split_is_read_as_it_is(tmp_path):
    rows = [{"prompt": p, "answer": "1", "id": p, "source": "s"} for p in "cab"]
    schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("prompt", "answer", "id", "source")])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "train.parquet")
    problems, dropped = read_problems(tmp_path / "train.parquet", Reading(), seed=0, parsable=lambda _: 1 / 0)
    assert ([problem.prompt for problem in problems], dropped) == (["c", "a", "b"], {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "", "answer": 1}\n', "none of its 1 rows is a problem"),
        ("a.csv", b"prompt,answer\n", r"is no \.parquet or \.jsonl file"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
    ],
)
def test_a_raw_file_without_problems_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_problems(tmp_path / name, Reading(), seed=0, parsable=all_parsable)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
