"""vLLM's routes in one tensor: the same as decoding everything first, with one array at a time and no wrapped id."""

import base64
import dataclasses
import io
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import load

_routes = load("../benchmarks/_routes.py")
RoutedRow, decode_routes = _routes.RoutedRow, _routes.decode_routes

SIZES = {"prompt_length": 4, "response_length": 6, "layers": 2, "top_k": 3, "experts": 256}


def saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def make(
    prompt: int, response: int, dtype=np.uint8, seed: int = 0, name: str = "rollout", high: int = 256
) -> RoutedRow:
    shape = (prompt + response - 1, SIZES["layers"], SIZES["top_k"])
    array = np.random.default_rng(seed).integers(1, high, shape).astype(dtype)
    return RoutedRow(name, text(saved(array)), prompt, response)


def decode_all(rows: list[RoutedRow], prompt_length: int, response_length: int, dtype: torch.dtype) -> torch.Tensor:
    """Every payload through np.load, then token after token into its place."""
    arrays = [np.load(io.BytesIO(base64.b64decode(row.payload)), allow_pickle=False) for row in rows]
    routes = torch.zeros((len(rows), prompt_length + response_length, *arrays[0].shape[1:]), dtype=torch.int64)
    for place, row, array in zip(routes, rows, arrays, strict=True):
        head = list(array[: row.prompt_tokens])[:prompt_length]
        answer = list(array[row.prompt_tokens :])[:response_length]
        for position, experts in enumerate(head, start=prompt_length - len(head)):
            place[position] = torch.from_numpy(experts.astype(np.int64))
        for position, experts in enumerate(answer, start=prompt_length):
            place[position] = torch.from_numpy(experts.astype(np.int64))
    return routes.to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    wide=st.booleans(),
    experts=st.sampled_from([256, 257, 512]),
    seed=st.integers(0, 1000),
)
def test_the_result_is_that_of_decoding_everything_first(lengths, wide, experts, seed):
    dtype = np.uint16 if wide or experts > 256 else np.uint8
    rows = [make(p, r, dtype, seed + i, high=experts) for i, (p, r) in enumerate(lengths)]
    routes = decode_routes(iter(rows), count=len(rows), **{**SIZES, "experts": experts})
    expected = torch.uint8 if experts == 256 else torch.uint16
    assert routes.dtype == expected
    assert torch.equal(routes, decode_all(rows, 4, 6, expected))


def test_where_tokens_go():
    row = make(2, 3)
    [routes] = decode_routes([row], count=1, **SIZES).numpy()
    array = np.load(io.BytesIO(base64.b64decode(row.payload)))
    np.testing.assert_array_equal(routes[2:6], array)  # the prompt ends at P = 4, the response starts there
    assert not routes[:2].any() and not routes[6:].any()  # padding, and the last token
    [cut] = decode_routes([make(7, 9)], count=1, **SIZES).numpy()
    array = np.load(io.BytesIO(base64.b64decode(make(7, 9).payload)))
    np.testing.assert_array_equal(cut, np.concatenate([array[:4], array[7:13]]))


def test_byte_order_and_axis_order_are_read():
    array = np.random.default_rng(0).integers(0, 200, (4, 2, 3)).astype(np.uint8)
    plain = decode_routes([RoutedRow("a", text(saved(array)), 2, 3)], count=1, **SIZES)
    for form in (np.asfortranarray(array), array.astype(">u2"), array.astype("<u2")):
        assert torch.equal(plain, decode_routes([RoutedRow("a", text(saved(form)), 2, 3)], count=1, **SIZES))
    assert torch.equal(plain, decode_routes([RoutedRow("a", text(saved(array)).encode(), 2, 3)], count=1, **SIZES))


def test_ids_are_widened_or_refused_but_never_wrapped():
    array = np.full((4, 2, 3), 5, np.uint16)
    array[2, 1, 0] = 261
    row = RoutedRow("rollout (prompt 3, sample 1)", text(saved(array)), 2, 3)
    with pytest.raises(
        ValueError, match=r"routes of rollout \(prompt 3, sample 1\): expert id 261, allowed are 0 … 255"
    ):
        decode_routes([row], count=1, **SIZES)
    wide = decode_routes([row], count=1, **{**SIZES, "experts": 262})
    assert wide.dtype == torch.uint16 and wide.long()[0, 4, 1, 0] == 261
    with pytest.raises(ValueError, match="expert id 255, allowed are 0 … 127"):
        decode_routes(
            [RoutedRow("a", text(saved(np.full((4, 2, 3), 255, np.uint8))), 2, 3)], count=1, **{**SIZES, "experts": 128}
        )


GOOD = make(2, 3, name="rollout (prompt 0, sample 7)")
RAW = base64.b64decode(GOOD.payload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload": None}, "the engine returned none"),
        ({"prompt_tokens": 3}, r"shape is \(4, 2, 3\), must be \(5, 2, 3\) \(6 tokens"),
        ({"response_tokens": 0}, "at least one token"),
        ({"payload": "no base64!"}, "not base64"),
        ({"payload": "é"}, "not base64"),
        ({"payload": GOOD.payload[:-1]}, "not base64"),
        ({"payload": ""}, "not the bytes of np.save"),
        ({"payload": text(b"\x93NUMPY\x02" + RAW[7:])}, "not the bytes of np.save"),
        ({"payload": text(RAW[:8] + b"\x10\x00" + RAW[10:])}, "not the bytes of np.save"),
        ({"payload": text(RAW[:20])}, "not the bytes of np.save"),
        ({"payload": text(RAW[:-1])}, "23 bytes of data, its header announces 24"),
        ({"payload": text(RAW + b"\0")}, "25 bytes of data, its header announces 24"),
        ({"payload": text(saved(np.zeros((4, 2, 3), np.int64)))}, "dtype is <i8, allowed are uint8 and uint16"),
        ({"payload": text(saved(np.zeros((4, 2, 3), np.float32)))}, "dtype is <f4"),
        ({"payload": text(saved(np.array([print] * 24, dtype=object).reshape(4, 2, 3)))}, r"dtype is \|O"),
        ({"payload": text(saved(np.zeros((4, 3, 2), np.uint8)))}, r"shape is \(4, 3, 2\), must be \(4, 2, 3\)"),
        ({"payload": text(saved(np.zeros((24,), np.uint8)))}, r"shape is \(24,\)"),
        ({"payload": text(saved(np.zeros((), np.uint8)))}, r"shape is \(\)"),
    ],
)
def test_a_faulty_row_is_named(changes, message):
    rows = [make(2, 3, name="sound"), dataclasses.replace(GOOD, **changes)]
    with pytest.raises(ValueError, match=rf"^routes of rollout \(prompt 0, sample 7\): .*{message}") as error:
        decode_routes(rows, count=2, **SIZES)
    assert "\n" not in str(error.value)


def test_a_changed_byte_is_an_error_or_another_id():
    data = len(RAW) - 24
    for position in range(len(RAW)):
        for value in range(256):
            raw = RAW[:position] + bytes([value]) + RAW[position + 1 :]
            try:
                routes = decode_routes([dataclasses.replace(GOOD, payload=text(raw))], count=1, **SIZES)
            except ValueError as error:
                assert str(error).startswith("routes of rollout (prompt 0, sample 7): ")
                assert position < data
            else:
                assert position >= data or raw == RAW
                assert routes.flatten()[12:36].numpy().tobytes() == raw[data:]


def test_missing_and_surplus_rows_are_errors():
    with pytest.raises(ValueError, match="routes: 2 rows of 3 came, rows from 2 on are missing"):
        decode_routes([make(2, 3), make(1, 1)], count=3, **SIZES)
    with pytest.raises(ValueError, match="more than the 1 rows that were announced, the next is second"):
        decode_routes([make(2, 3), make(1, 1, name="second")], count=1, **SIZES)


def test_one_array_at_a_time():
    rows = [make(200, 3000, seed=i) for i in range(6)]
    array = 3199 * SIZES["layers"] * SIZES["top_k"]
    sizes = {**SIZES, "prompt_length": 200, "response_length": 3000}
    decode_routes(rows, count=6, **sizes)
    tracemalloc.start()
    decode_routes(rows, count=6, **sizes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * array
