"""Generated and local problems behind the same contract."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from score_centering.data import open_source
from score_centering.settings import UserError

CHAIN_SUM = {
    "task": "chain_sum",
    "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 20,
    "package_version": "0.1.25",
}
ROWS = [
    {"prompt": "What is 1+1?", "verification_info": '{"ground_truth": "2"}', "solve_rate_qwen_r1_distill_7b": 0.5},
    {"prompt": "What is 1+2?", "verification_info": '{"ground_truth": 3}', "problem_id": 17},
    {"prompt": "What is 1+3?", "verification_info": "{}", "task_type": "verifiable_math"},
]


def test_reasoning_gym_generates_the_same_rows_for_the_same_pin():
    first, again = (open_source("reasoning_gym", CHAIN_SUM, seed=42) for _ in range(2))
    other = open_source("reasoning_gym", CHAIN_SUM, seed=43)
    rows = list(first.rows)
    assert rows == list(again.rows) != list(other.rows)
    assert len(rows) == 20
    assert all(str(eval(row.prompt.split(": ")[1].rstrip(" ="))) == row.answer for row in rows)
    assert first.pin == {"kind": "reasoning_gym", "seed": 42, **CHAIN_SUM}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"package_version": "0.1.0"}, r"package_version: 0\.1\.0 is pinned, 0\.1\.25 is installed"),
        ({"task": "chain_summ"}, "'chain_summ' is no reasoning-gym task"),
        ({"parameters": {"min_words": 1}}, "chain_sum refuses .*min_words"),
        ({"parameters": {"min_terms": 0}}, "chain_sum refuses"),
    ],
)
def test_what_reasoning_gym_cannot_do_is_one_line(change, message):
    with pytest.raises(UserError, match=message):
        open_source("reasoning_gym", {**CHAIN_SUM, **change}, seed=42)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS, pq_schema(ROWS)), tmp_path / "rows.parquet")
    sources = [open_source("local", {"path": str(tmp_path / f"rows.{kind}")}, seed=0) for kind in ("jsonl", "parquet")]
    first, second = (list(source.rows) for source in sources)
    assert first == second
    assert [(row.answer, row.fault) for row in first] == [("2", None), ("3", None), (None, "missing_answer")]
    assert (first[0].solve_rate, first[1].id) == (0.5, "17")
    assert [list(source.files) for source in sources] == [["rows.jsonl"], ["rows.parquet"]]


def pq_schema(rows):
    kinds = {str: pa.string(), float: pa.float64(), int: pa.int64()}
    return pa.schema({name: kinds[type(value)] for row in rows for name, value in row.items()})


def test_a_plain_answer_column_works_and_numbers_keep_their_digits(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "answer": 0.10}\n\n{"prompt": "b", "answer": ["1", 2]}\n{"prompt": "c", "answer": null}\n'
        '{"prompt": null, "answer": 1, "solve_rate": "high"}\n{"prompt": "e"}\n'
    )
    rows = list(open_source("local", {"path": str(tmp_path / "rows.jsonl")}, seed=0).rows)
    assert [(row.prompt, row.answer, row.fault) for row in rows] == [
        ("a", "0.10", None),
        ("b", "1, 2", None),
        ("c", None, "null_answer"),
        (None, "1", None),
        ("e", None, "missing_answer"),
    ]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text("not data")
    source = open_source("local", {"path": str(tmp_path)}, seed=0)
    assert list(source.files) == ["a.jsonl", "b.jsonl"]
    assert [row.prompt for row in source.rows] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("name", ["missing.jsonl", "rows.csv", "."])
def test_a_path_without_data_is_one_line(tmp_path, name):
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    with pytest.raises(UserError, match=r"dataset\.local\.path: .* is no \.parquet or \.jsonl file"):
        open_source("local", {"path": str(tmp_path / name)}, seed=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a", "answer": "1"}\n{"prompt"\n', r"rows\.jsonl:2: not valid JSON"),
        ("rows.jsonl", b'"text"\n', r"rows\.jsonl:1: a JSON object is needed"),
        ("rows.jsonl", b"\xff\xfe\n", r"rows\.jsonl:1: not valid JSON"),
        ("rows.parquet", b"PAR1 not", r"rows\.parquet: not a readable parquet file"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(open_source("local", {"path": str(tmp_path)}, seed=0).rows)


def test_a_parquet_file_without_the_columns_is_named(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "answer": ["1"]}), tmp_path / "rows.parquet")
    with pytest.raises(
        UserError,
        match=r"parquet: no column prompt, found answer, question; name yours: dataset\.columns\.prompt=question$",
    ):
        list(open_source("local", {"path": str(tmp_path)}, seed=0).rows)


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="'web' is none of reasoning_gym, sums, hub, local"):
        open_source("web", {}, seed=0)


def test_jsonl_with_other_columns_is_named_by_file_and_columns(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+1?", "solution": "2"}, {"question": "1+2?", "level": 3}])
    with pytest.raises(
        UserError,
        match=r"rows\.jsonl: no column prompt and no column verification_info or answer, "
        r"found level, question, solution; "
        r"name yours: dataset\.columns\.prompt=question dataset\.columns\.answer=solution$",
    ):
        list(open_source("local", {"path": str(tmp_path / "rows.jsonl")}, seed=0).rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_user_message_is_a_prompt_and_other_conversations_are_malformed(tmp_path, kind):
    user, system = {"role": "user", "content": "What is 1+1?"}, {"role": "system", "content": "Be brief."}
    rows = [{"prompt": prompt, "answer": "2"} for prompt in ([user], [system, user], [system], [])]
    if kind == "jsonl":
        write_jsonl(tmp_path / "rows.jsonl", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = list(open_source("local", {"path": str(tmp_path / f"rows.{kind}")}, seed=0).rows)
    assert [(row.prompt, row.fault) for row in found] == [
        ("What is 1+1?", None), *[(None, "malformed_prompt")] * 3,
    ]  # fmt: skip
