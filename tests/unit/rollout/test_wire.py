"""The wire form of a record: exact round trips, its size, and one clear line for every payload that isn't one."""

import dataclasses
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.rollout import Rollout, candidates
from score_centering.rollout.wire import _from_planes, _to_planes, decode, encode, plane_widths

ARRAYS = ("prompt_ids", "token_ids", "logprobs", "candidate_ids", "candidate_logprobs", "routes")
HEADER_BYTES = 48


def make(rows: int, k: int, vocab: int, seed: int = 0, prompt: int = 3, routes: np.dtype | None = None) -> Rollout:
    """A sound record: the sampled token is a candidate in about half of the rows."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.choice(vocab, k, replace=False) for _ in range(rows)]).astype(np.int32) if k else None
    logprobs = -rng.exponential(3, (rows, max(k, 1))).astype(np.float32)
    logprobs = np.sort(np.minimum(logprobs, np.float32(-np.log(max(k, 1)))), axis=1)[:, ::-1]
    head = candidates.round_logprobs(logprobs)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    sampled = logprobs[:, -1].copy()
    if k:
        inside = rng.random(rows) < 0.5
        tokens[inside] = ids[inside, 0]
        outside = ~inside & (ids == tokens[:, None]).any(1)
        tokens[outside] = ids[outside, 0]
        sampled[tokens == ids[:, 0]] = logprobs[tokens == ids[:, 0], 0]
    shape = (prompt + rows - 1, 2, 3)
    return Rollout(
        prompt_index=int(rng.integers(0, 1 << 40)),
        sample_index=int(rng.integers(0, 100)),
        prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
        token_ids=tokens,
        logprobs=sampled,
        candidate_ids=ids,
        candidate_logprobs=head if k else None,
        finish_reason=("stop", "length")[seed % 2],
        routes=None if routes is None else rng.integers(0, np.iinfo(routes).max, shape).astype(routes),
    )


def assert_same(first: Rollout, second: Rollout) -> None:
    for field in ("prompt_index", "sample_index", "finish_reason"):
        assert getattr(first, field) == getattr(second, field)
    for field in ARRAYS:
        a, b = getattr(first, field), getattr(second, field)
        assert (a is None) == (b is None), field
        if a is not None:
            assert a.dtype == b.dtype, field
            np.testing.assert_array_equal(a, b)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    k=st.integers(0, 20),
    vocab=st.one_of(st.integers(20, 600), st.sampled_from([65536, 65537, 248_320, 2**31 - 1])),
    prompt=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    routes=st.sampled_from([None, np.dtype(np.uint8), np.dtype(np.uint16)]),
)
def test_every_record_comes_back_to_the_bit(rows, k, vocab, prompt, seed, routes):
    if vocab > 10**6:
        rollout = make(rows, k, 1000, seed, prompt, routes)
        shift = lambda ids: None if ids is None else (ids + (vocab - 1000)).astype(np.int32)  # noqa: E731
        rollout = dataclasses.replace(
            rollout, token_ids=shift(rollout.token_ids), candidate_ids=shift(rollout.candidate_ids)
        )
    else:
        rollout = make(rows, k, vocab, seed, prompt, routes)
    payload = encode(rollout)
    assert_same(rollout, decode(payload, vocab))
    assert_same(rollout, decode(memoryview(payload), vocab, top_logprobs=k))
    assert encode(decode(payload, vocab)) == payload


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 31), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_planes_hold_ids_of_every_width(bits, values):
    ids = (np.array(values, dtype=np.int64) & ((1 << bits) - 1)).astype(np.int32)
    planes = _to_planes(ids, bits)
    assert sum(plane.nbytes for plane in planes) <= (len(ids) * bits + 7 * 3) // 8 + 3
    np.testing.assert_array_equal(_from_planes(planes, bits, (1, len(ids)))[0], ids)


def test_a_token_takes_at_most_0_6_kib_at_128_candidates():
    assert plane_widths(18) == [16, 2]
    rollout = make(500, 128, 248_320, prompt=1)
    size = len(encode(rollout)) / 500
    assert 552 < size < 553 < 0.6 * 1024


def test_logprobs_keep_their_precision():
    exact = np.sort(-np.random.default_rng(0).exponential(4, (50, 8)).astype(np.float32) - 3, axis=1)[:, ::-1]
    rollout = make(50, 8, 600)
    rank = np.where(rollout.token_ids == rollout.candidate_ids[:, 0], 0, -1)
    rollout = dataclasses.replace(rollout, candidate_logprobs=exact, logprobs=exact[np.arange(50), rank])
    arrived = decode(encode(rollout), 600)
    assert np.abs(arrived.candidate_logprobs - exact).max() < 1e-3
    np.testing.assert_array_equal(arrived.candidate_logprobs, candidates.round_logprobs(exact))
    np.testing.assert_array_equal(arrived.logprobs, rollout.logprobs)


def test_nothing_is_copied_that_need_not_be():
    payload = encode(make(9, 4, 600, routes=np.dtype(np.uint8)))
    arrived = decode(payload, 600)
    whole = np.frombuffer(payload, np.uint8)
    for field in ("prompt_ids", "token_ids", "logprobs", "routes"):
        assert np.shares_memory(getattr(arrived, field), whole), field
        assert getattr(arrived, field).flags.aligned, field


def sealed(payload: bytes, offset: int, value: bytes) -> bytes:
    """The payload with other bytes at `offset`, and a checksum that agrees."""
    body = payload[:offset] + value + payload[offset + len(value) : -4]
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize("routes", [None, np.dtype(np.uint16)], ids=["plain", "routes"])
def test_a_payload_cut_at_any_byte_is_refused(routes):
    payload = encode(make(4, 3, 600, routes=routes))
    for length in range(len(payload)):
        with pytest.raises(ValueError, match=r"^rollout payload: \d+ bytes, (a record has|its header announces)"):
            decode(payload[:length], 600)
    for extra in (b"\0", payload):
        with pytest.raises(ValueError, match="its header announces"):
            decode(payload + extra, 600)


def test_a_flipped_bit_anywhere_is_refused():
    payload = bytearray(encode(make(4, 3, 600, routes=np.dtype(np.uint8))))
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^rollout payload: .*$") as error:
            decode(payload, 600)
        assert "\n" not in str(error.value)
        payload[bit // 8] ^= 1 << bit % 8


START = encode(make(1, 1, 600))[:6]  # magic and version


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise, framed):
    if framed:
        noise = START + noise
        noise += struct.pack("<I", zlib.crc32(noise))
    with pytest.raises(ValueError, match=r"^rollout payload: "):
        decode(noise, 600)


def test_payloads_of_another_kind_are_refused():
    payload = encode(make(4, 3, 600))
    for changed, message in [
        (sealed(payload, 0, b"JSON"), "begins with b'JSON'"),
        (sealed(payload, 4, b"\2\0"), "version 2, this program reads version 1"),
        (sealed(payload, 6, b"\2"), "impossible finish reason"),
        (sealed(payload, 7, b"\0"), "impossible width of candidate ids"),
        (sealed(payload, 7, b"\x20"), "impossible width of candidate ids"),
        (sealed(payload, 24, b"\0\0\0\0"), "impossible number of tokens"),
        (sealed(payload, 28, b"\0\0\0\0"), "impossible number of tokens"),
        (sealed(payload, 32, b"\4"), "its header announces"),
        (sealed(payload, 36, b"\1"), "impossible shape of routes"),
        (sealed(payload, 36, b"\3\0\0\0\1\0\0\0\1"), "impossible shape of routes"),
    ]:
        with pytest.raises(ValueError, match=f"^rollout payload: .*{message}"):
            decode(changed, 600)
    for asked in (0, 4):
        with pytest.raises(ValueError, match=f"3 candidates a position, {asked} were asked for"):
            decode(payload, 600, top_logprobs=asked)


def test_a_record_is_validated_on_arrival():
    payload = encode(make(4, 3, 600))
    with pytest.raises(ValueError, match=r"rollout \(prompt \d+, sample \d+\)"):
        decode(payload, 10)
    token = HEADER_BYTES + 4 * 3
    with pytest.raises(ValueError, match="position 0: token id outside 0 … 599"):
        decode(sealed(payload, token, struct.pack("<i", -1)), 600)
    logprob = token + 4 * 4
    with pytest.raises(ValueError, match="position 1: log-prob of the sampled token is not finite"):
        decode(sealed(payload, logprob + 4, struct.pack("<f", np.nan)), 600)
    with pytest.raises(ValueError, match="position 0: candidates are not sorted"):
        decode(sealed(payload, logprob + 4 * 4, b"\xff\xff"), 600)
    with pytest.raises(ValueError, match="prompt position 0: token id outside"):
        decode(sealed(payload, HEADER_BYTES, struct.pack("<i", 600)), 600)


def test_records_that_are_broken_are_not_sent():
    sound = make(4, 3, 600)
    for changes, message in [
        ({"logprobs": sound.logprobs[:2]}, "4 tokens but 2 rows of logprobs"),
        ({"candidate_ids": sound.candidate_ids - 600}, "a candidate id is -"),
        (
            {"candidate_ids": sound.candidate_ids[:, :0], "candidate_logprobs": sound.candidate_logprobs[:, :0]},
            "0 cand",
        ),
        ({"candidate_logprobs": sound.candidate_logprobs * np.float32(np.nan)}, "at most 0 nats and not NaN"),
        ({"prompt_ids": sound.prompt_ids.astype(np.int64)}, "prompt_ids is int64"),
        ({"prompt_ids": sound.prompt_ids[:0]}, "no prompt token"),
        ({"routes": np.zeros((7, 2, 2), np.uint8)}, r"routes are uint8 \(7, 2, 2\), must be uint8 or uint16 \(6, "),
        ({"routes": np.zeros((6, 2, 2), np.int64)}, "routes are int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            encode(dataclasses.replace(sound, **changes))
