"""The wire form of a capture record against the two usual ones: bytes a token, encode and decode time.

One record of R tokens with K = 128 candidates from a vocabulary of 248,320, whose log-probs lie on the 16-bit grid.
Rivals: JSON in the shape of Chat Completions' `top_logprobs` (ids as `token_id:N`, as vLLM returns them), and NumPy's
`.npz` of the record's arrays in base64, as an HTTP body carries it. Everybody decodes to the same arrays; only ours
checks the record, and the time of that is included. Either device gives the same: this runs on the CPU.
"""

import base64
import io
import json
from collections.abc import Callable

import numpy as np
from _common import median_seconds, parse_args, report

from score_centering.rollout import Rollout, candidates
from score_centering.rollout.wire import decode, encode

VOCAB, K, PROMPT = 248_320, 128, 200
FIELDS = ("prompt_ids", "token_ids", "logprobs", "candidate_ids", "candidate_logprobs")
KIB = 1024


def make_record(rows: int) -> Rollout:
    """A heavy-tailed head a row; the sampled token is drawn from it, or lies in the tail."""
    rng = np.random.default_rng(0)
    logits = np.sort(2.5 * rng.standard_t(4, (rows, K)) + 5, axis=1)[:, ::-1]
    tail = np.log(np.exp(logits).sum(1, keepdims=True) / 0.98)
    head = candidates.round_logprobs((logits - tail).astype(np.float32))
    ids = np.sort(rng.integers(0, VOCAB - K, (rows, K)), axis=1) + np.arange(K)  # distinct
    ids = rng.permuted(ids, axis=1).astype(np.int32)
    share = np.cumsum(np.exp(head.astype(np.float64)), axis=1)
    rank = (share < rng.random((rows, 1))).sum(1)
    inside, row = rank < K, np.arange(rows)
    place = np.minimum(rank, K - 1)
    unused = np.array([np.setdiff1d(np.arange(K + 1), ids[r])[0] for r in range(rows)])
    return Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_ids=rng.integers(0, VOCAB, PROMPT).astype(np.int32),
        token_ids=np.where(inside, ids[row, place], unused).astype(np.int32),
        logprobs=np.where(inside, head[row, place], head[:, -1] - 1).astype(np.float32),
        candidate_ids=ids,
        candidate_logprobs=head,
        finish_reason="stop",
    )


def encode_json(rollout: Rollout) -> bytes:
    """The `choices[].logprobs.content` of a Chat Completions response, with the ids of prompt and tokens beside it."""
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": logprob,
            "top_logprobs": [
                {"token": f"token_id:{candidate}", "logprob": value}
                for candidate, value in zip(ids, values, strict=True)
            ],
        }
        for token, logprob, ids, values in zip(
            rollout.token_ids.tolist(),
            rollout.logprobs.tolist(),
            rollout.candidate_ids.tolist(),
            rollout.candidate_logprobs.tolist(),
            strict=True,
        )
    ]
    body = {"prompt_token_ids": rollout.prompt_ids.tolist(), "content": content, "finish_reason": rollout.finish_reason}
    return json.dumps(body, separators=(",", ":")).encode()


def decode_json(payload: bytes) -> dict[str, np.ndarray]:
    body = json.loads(payload)
    content, prefix = body["content"], len("token_id:")
    heads = [position["top_logprobs"] for position in content]
    return {
        "prompt_ids": np.array(body["prompt_token_ids"], np.int32),
        "token_ids": np.array([int(position["token"][prefix:]) for position in content], np.int32),
        "logprobs": np.array([position["logprob"] for position in content], np.float32),
        "candidate_ids": np.array([[int(entry["token"][prefix:]) for entry in head] for head in heads], np.int32),
        "candidate_logprobs": np.array([[entry["logprob"] for entry in head] for head in heads], np.float32),
    }


def encode_npz(rollout: Rollout) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(rollout, name) for name in FIELDS})
    return base64.b64encode(buffer.getbuffer())


def decode_npz(payload: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(base64.b64decode(payload)), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in FIELDS}


def decode_wire(payload: bytes) -> dict[str, np.ndarray]:
    rollout = decode(payload, VOCAB, top_logprobs=K)
    return {name: getattr(rollout, name) for name in FIELDS}


FORMS: dict[str, tuple[Callable[[Rollout], bytes], Callable[[bytes], dict[str, np.ndarray]]]] = {
    "wire": (encode, decode_wire),
    "json": (encode_json, decode_json),
    "npz_base64": (encode_npz, decode_npz),
}


def main() -> None:
    arguments = parse_args(__doc__)
    rows = 256 if arguments.quick else 2048
    rollout = make_record(rows)
    figures: dict[str, float] = {"tokens": rows}
    changed = 0
    for name, (pack, unpack) in FORMS.items():
        payload = pack(rollout)
        arrived = unpack(payload)
        changed += sum(not np.array_equal(arrived[field], getattr(rollout, field)) for field in FIELDS)
        figures[f"{name}: KiB a token"] = len(payload) / rows / KIB
        slow = name == "json"
        for what, run in (("encode", lambda: pack(rollout)), ("decode", lambda: unpack(payload))):  # noqa: B023
            figures[f"{name}: {what}, us a token"] = (
                median_seconds(run, "cpu", repeats=3 if slow else 15, warm_ups=1) / rows * 1e6
            )

    def ratio(rival: str, what: str) -> float:
        return figures[f"{rival}: {what}, us a token"] / figures[f"wire: {what}, us a token"]

    size = figures["wire: KiB a token"]
    figures["wire against npz_base64: bytes"] = size / figures["npz_base64: KiB a token"]
    figures["wire against json: bytes"] = size / figures["json: KiB a token"]
    for what in ("encode", "decode"):
        figures[f"wire against npz_base64: {what} speed"] = ratio("npz_base64", what)
    goals = {
        "KiB a token": (size, 0.6),
        "arrays changed on the way": (changed, 0),
        "encode speed against JSON": (ratio("json", "encode"), 10.0, "at least"),
        "decode speed against JSON": (ratio("json", "decode"), 10.0, "at least"),
    }
    report("transport", "cpu", figures, goals)


if __name__ == "__main__":
    main()
