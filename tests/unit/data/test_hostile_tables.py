"""Tables with wrong types or damaged bytes: problems come out whole, or one line says why not."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from score_centering.data.dataset_manifest import TABLE_SCHEMA, read_table
from score_centering.data.tables import read_rows
from score_centering.settings import UserError

COLUMNS = {
    "text": pa.array(["1", "2"]),
    "text, one missing": pa.array(["1", None]),
    "large text": pa.array(["1", "2"], pa.large_string()),
    "dictionary": pa.array(["1", "2"]).dictionary_encode(),
    "integers": pa.array([1, 2]),
    "floats": pa.array([0.5, float("nan")]),
    "bytes": pa.array([b"\xff", b"1"]),
    "lists": pa.array([["1"], []]),
    "structs": pa.array([{"a": 1}, {"a": None}]),
    "booleans": pa.array([True, False]),
    "times": pa.array([0, 1], pa.timestamp("us", tz="UTC")),
    "nulls": pa.nulls(2),
    "no text": pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    ),
}
NAMES = ["prompt", "answer", "verification_info", "id", "problem_id", "source", "solve_rate"]
FIXTURES = [HealthCheck.function_scoped_fixture]


def one_line(error: UserError, path) -> None:
    assert str(path) in str(error) and "\n" not in str(error)


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURES)
@given(kinds=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(sorted(COLUMNS)), min_size=1))
def test_columns_of_any_type(tmp_path, kinds):
    path = tmp_path / "it's – a table.parquet"
    pq.write_table(pa.table({name: COLUMNS[kind] for name, kind in kinds.items()}), path)
    with pytest.raises(UserError) as error:  # a split has exactly its four columns of text, none of them nullable
        read_table(path)
    one_line(error.value, path)
    try:
        rows = list(read_rows([path]))
    except UserError as fault:
        one_line(fault, path)
    else:
        assert len(rows) == 2
        assert all(row.prompt is None or isinstance(row.prompt, str) for row in rows)
        assert all(row.answer is None or isinstance(row.answer, str) for row in rows)


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURES)
@given(data=st.data())
def test_damaged_bytes(tmp_path, data):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table([pa.array(["a", "b"])] * 4, schema=TABLE_SCHEMA), path)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    path.write_bytes(content)
    for read in (lambda: read_table(path), lambda: list(read_rows([path]))):
        try:
            read()
        except UserError as error:
            one_line(error, path)


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    folder = tmp_path / "source=elsewhere" / "x=1"
    folder.mkdir(parents=True)
    pq.write_table(pa.table([pa.array(["a"])] * 4, schema=TABLE_SCHEMA), folder / "train.parquet")
    assert read_table(folder / "train.parquet") == [("a", "a", "a", "a")]
