"""100 malformed capture records: each is refused with one line that names its rollout and, where it has one, the
position."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

from score_centering.rollout import Rollout, candidates, validate_all
from score_centering.settings import UserError

VOCAB, K, RECORDS = 40, 6, 100
Fault = tuple[dict, int | None]  # changed fields, and the first faulty position if the fault has one


def sampled(rng: np.random.Generator, prompt: int, sample: int) -> Rollout:
    """A record as an engine returns it: every token from the distribution whose head is recorded."""
    rows = int(rng.integers(3, 12))
    logits = 2 * rng.normal(size=(rows, VOCAB))
    logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    tokens = np.array([rng.choice(VOCAB, p=np.exp(row) / np.exp(row).sum()) for row in logprobs], np.int32)
    head = np.argsort(-logprobs, axis=1)[:, :K].astype(np.int32)
    return Rollout(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=rng.integers(0, VOCAB, size=4).astype(np.int32),
        token_ids=tokens,
        logprobs=np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0],
        candidate_ids=head,
        candidate_logprobs=candidates.round_logprobs(np.take_along_axis(logprobs, head, 1)),
        finish_reason="stop",
    )


def put(record: Rollout, field: str, row: int, value) -> dict:
    """`field` of the record with another value in one row."""
    array = getattr(record, field).copy()
    array[row] = value
    return {field: array}


def put_candidate(record: Rollout, field: str, row: int, column: int, value: float) -> dict:
    array = getattr(record, field).copy()
    array[row, column] = value
    return {field: array}


def outside(rng) -> int:
    return int(rng.choice([-1, -100, -(1 << 31), VOCAB, VOCAB + 7, (1 << 31) - 1]))


def positive(rng) -> float:
    return float(rng.choice([1e-6, 0.5, 30.0, 3e38]))


def not_finite(rng) -> float:
    return float(rng.choice([np.nan, np.inf, -np.inf]))


def array_field(rng) -> str:
    return str(rng.choice(["prompt_ids", "token_ids", "logprobs", "candidate_ids", "candidate_logprobs"]))


def wrong_dtype(record, rng, row) -> Fault:
    field = array_field(rng)
    dtypes = [
        "float64",
        "float16",
        "int64",
        "complex64",
        "bool",
        "object",
        "U8",
        getattr(record, field).dtype.str.replace("<", ">"),
    ]
    return {field: getattr(record, field).astype(str(rng.choice(dtypes)))}, None


def no_array(record, rng, row) -> Fault:
    field = array_field(rng)
    return {field: [getattr(record, field).tolist(), b"\x00", 7, "text"][rng.integers(4)]}, None


def wrong_axes(record, rng, row) -> Fault:
    field = array_field(rng)
    array = getattr(record, field)
    return {field: [array[..., None], array[None], np.array(array.flat[0])][rng.integers(3)]}, None


def sampled_not_finite(record, rng, row) -> Fault:
    return put(record, "logprobs", row, not_finite(rng)), row


def candidate_not_finite(record, rng, row) -> Fault:
    return put_candidate(record, "candidate_logprobs", row, rng.integers(K), not_finite(rng)), row


def sampled_positive(record, rng, row) -> Fault:
    return put(record, "logprobs", row, positive(rng)), row


def candidate_positive(record, rng, row) -> Fault:
    return put_candidate(record, "candidate_logprobs", row, rng.integers(K), positive(rng)), row


def duplicate(record, rng, row) -> Fault:
    first, second = rng.choice(K, size=2, replace=False)
    return put_candidate(record, "candidate_ids", row, first, record.candidate_ids[row, second]), row


def token_outside(record, rng, row) -> Fault:
    return put(record, "token_ids", row, outside(rng)), row


def candidate_outside(record, rng, row) -> Fault:
    return put_candidate(record, "candidate_ids", row, rng.integers(K), outside(rng)), row


def prompt_outside(record, rng, row) -> Fault:
    place = int(rng.integers(len(record.prompt_ids)))
    return put(record, "prompt_ids", place, outside(rng)), place


def another_k(record, rng, row) -> Fault:
    width = int(rng.integers(1, K))
    return {
        "candidate_ids": record.candidate_ids[:, :width],
        "candidate_logprobs": record.candidate_logprobs[:, :width],
    }, None


def one_k_differs(record, rng, row) -> Fault:
    field = str(rng.choice(["candidate_ids", "candidate_logprobs"]))
    return {field: getattr(record, field)[:, : int(rng.integers(1, K))]}, None


def no_head(record, rng, row) -> Fault:
    return [{"candidate_ids": None, "candidate_logprobs": None}, {"candidate_ids": None}][rng.integers(2)], None


def rows_missing(record, rng, row) -> Fault:
    field = str(rng.choice(["logprobs", "candidate_ids", "candidate_logprobs"]))
    return {field: getattr(record, field)[:row]}, row


def rows_too_many(record, rng, row) -> Fault:
    field = str(rng.choice(["logprobs", "candidate_ids", "candidate_logprobs"]))
    array = getattr(record, field)
    return {field: np.concatenate([array, array[:1]])}, len(record.token_ids)


def too_much_mass(record, rng, row) -> Fault:
    head = np.sort(rng.dirichlet(np.ones(K)) * rng.uniform(1.002, 5))[::-1]
    return put(record, "candidate_logprobs", row, np.minimum(np.log(head), 0)), row


def unsorted(record, rng, row) -> Fault:
    return put(record, "candidate_logprobs", row, record.candidate_logprobs[row, ::-1]), row


def shifted_rows(record, rng, row) -> Fault:
    """The head of every row from `row` on is that of the row before, the sampled token of `row` the likeliest one."""
    likeliest = record.candidate_ids[row, 0]
    record = dataclasses.replace(
        record,
        **put(record, "token_ids", row, likeliest),
        **put(record, "logprobs", row, record.candidate_logprobs[row, 0]),
    )
    ids, logprobs = record.candidate_ids.copy(), record.candidate_logprobs.copy()
    ids[row:], logprobs[row:] = record.candidate_ids[row - 1 : -1], record.candidate_logprobs[row - 1 : -1]
    changed = {"candidate_ids": ids, "candidate_logprobs": logprobs}
    return {"token_ids": record.token_ids, "logprobs": record.logprobs, **changed}, row


def another_logprob(record, rng, row) -> Fault:
    likeliest = put(record, "token_ids", row, record.candidate_ids[row, 0])
    return {**likeliest, **put(record, "logprobs", row, record.candidate_logprobs[row, 0] - 0.01)}, row


def no_token(record, rng, row) -> Fault:
    empty = {"logprobs": np.zeros(0, np.float32), "candidate_ids": np.zeros((0, K), np.int32)}
    head = {"candidate_logprobs": np.zeros((0, K), np.float32)}
    return [{"token_ids": np.zeros(0, np.int32), **empty, **head}, {"prompt_ids": np.zeros(0, np.int32)}][
        rng.integers(2)
    ], None


def bad_label(record, rng, row) -> Fault:
    return [{"finish_reason": "abort"}, {"finish_reason": None}, {"prompt_index": -1}, {"sample_index": 1.5}][
        rng.integers(4)
    ], None


def bad_routes(record, rng, row) -> Fault:
    tokens = len(record.prompt_ids) + len(record.token_ids)
    return {
        "routes": [np.zeros((tokens, 2, 2), np.uint8), np.zeros((tokens - 1, 2, 2), np.int64), "none"][rng.integers(3)]
    }, None


FAULTS: list[Callable[..., Fault]] = [
    wrong_dtype,
    no_array,
    wrong_axes,
    sampled_not_finite,
    candidate_not_finite,
    sampled_positive,
    candidate_positive,
    duplicate,
    token_outside,
    candidate_outside,
    prompt_outside,
    another_k,
    one_k_differs,
    no_head,
    rows_missing,
    rows_too_many,
    too_much_mass,
    unsorted,
    shifted_rows,
    another_logprob,
    no_token,
    bad_label,
    bad_routes,
]


@pytest.mark.parametrize("number", range(RECORDS))
def test_a_malformed_record_is_refused_by_name_and_position(number):
    fault, rng = FAULTS[number % len(FAULTS)], np.random.default_rng(number)
    batch = [sampled(rng, prompt, sample) for prompt in (3, 8) for sample in (0, 1)]
    validate_all(batch, VOCAB)
    place = int(rng.integers(1, len(batch)))
    record = batch[place]
    fields, position = fault(record, rng, int(rng.integers(1, len(record.token_ids))))
    batch[place] = dataclasses.replace(record, **fields)
    with pytest.raises(UserError) as error:
        validate_all(batch, VOCAB)
    message = str(error.value)
    assert "\n" not in message and len(message) < 250
    name = f"rollout (prompt {batch[place].prompt_index}, sample {batch[place].sample_index})"
    where = "" if position is None else rf", (prompt )?position {position}"
    assert re.match(rf"{re.escape(name)}{where}: ", message), message


def test_every_fault_is_drawn():
    assert len(FAULTS) <= RECORDS


@pytest.mark.parametrize("asked", [0, K - 1, K + 1])
def test_another_k_than_was_asked_for_is_refused(asked):
    with pytest.raises(UserError, match=rf"\(prompt 3, sample 0\): {K} candidates a position, must be {asked}"):
        validate_all([sampled(np.random.default_rng(0), 3, 0)], VOCAB, asked)
