"""The capture record of one rollout, and the check that every record passes on arrival (oracle 8 of the objective)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from score_centering.rollout.candidates import MIN_LOGPROB

MAX_HEAD_MASS = 1.001
HEAD_LOGPROB_TOLERANCE = 2e-3  # nats; candidates travel in 16 bits, sampled tokens in FP32
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response with the sampler's own probabilities, from the very call that sampled each token.

    P prompt tokens, R generated tokens, K candidates. Log-probs are in nats, of the full softmax at the sampling
    temperature, never renormalised. `token_ids` include the stop token when `finish_reason` is "stop". Candidates are
    sorted by descending log-prob.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: np.ndarray  # (P,) int32
    token_ids: np.ndarray  # (R,) int32
    logprobs: np.ndarray  # (R,) float32
    candidate_ids: np.ndarray | None  # (R, K) int32
    candidate_logprobs: np.ndarray | None  # (R, K) float32, on the 16-bit grid
    finish_reason: Literal["stop", "length"]
    routes: np.ndarray | None = None  # (P + R − 1, layers, top-k) uint8 or uint16: experts of every token but the last


def validate(rollout: Rollout, vocab_size: int) -> None:
    """Raises ValueError, naming rollout and position, when a record can't be what a sampler returned."""
    validate_all([rollout], vocab_size)


def validate_all(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """`validate` for a whole batch, in one pass over all its positions."""
    for rollout in rollouts:
        check_shapes(rollout)
        _check_sizes(rollout, vocab_size)
    owner = np.repeat(np.arange(len(rollouts)), [len(r.token_ids) for r in rollouts])
    position = np.concatenate([np.arange(len(r.token_ids)) for r in rollouts]) if rollouts else owner

    def refuse(faulty: np.ndarray, what: str) -> None:
        """faulty: one bool a position of the batch; the first one is reported."""
        if faulty.any():
            t = int(faulty.argmax())
            raise ValueError(f"{_name(rollouts[owner[t]])}, position {position[t]}: {what}")

    if not rollouts:
        return
    token_ids = np.concatenate([r.token_ids for r in rollouts])
    logprobs = np.concatenate([r.logprobs for r in rollouts])
    refuse((token_ids < 0) | (token_ids >= vocab_size), f"token id outside 0 … {vocab_size - 1}")
    refuse(~np.isfinite(logprobs), "log-prob of the sampled token is not finite")
    refuse(logprobs > 0, "log-prob of the sampled token is positive")
    if rollouts[0].candidate_ids is None:
        return
    ids = np.concatenate([r.candidate_ids for r in rollouts])
    head = np.concatenate([r.candidate_logprobs for r in rollouts])
    refuse(((ids < 0) | (ids >= vocab_size)).any(-1), f"candidate id outside 0 … {vocab_size - 1}")
    ordered = np.sort(ids, axis=-1)
    refuse((ordered[:, 1:] == ordered[:, :-1]).any(-1), "a candidate id occurs twice")
    refuse(~np.isfinite(head).all(-1), "a candidate log-prob is not finite")
    refuse((head > 0).any(-1), "a candidate log-prob is positive")
    refuse((head[:, 1:] > head[:, :-1]).any(-1), "candidates are not sorted by descending log-prob")
    refuse(np.exp(head).sum(-1, dtype=np.float64) > MAX_HEAD_MASS, f"candidates sum to more than {MAX_HEAD_MASS}")
    is_sampled = ids == token_ids[:, None]
    gap = np.abs(head - np.maximum(logprobs, MIN_LOGPROB)[:, None])
    refuse(
        (is_sampled & (gap > HEAD_LOGPROB_TOLERANCE)).any(-1),
        "the sampled token's log-prob differs from its log-prob among the candidates (is a row shifted?)",
    )


def _name(rollout: Rollout) -> str:
    return f"rollout (prompt {rollout.prompt_index}, sample {rollout.sample_index})"


def check_shapes(rollout: Rollout) -> None:
    """Raises ValueError, naming the rollout, when shapes, dtypes or the finish reason aren't those of a record."""
    rows = len(rollout.token_ids)
    if rows == 0:
        raise ValueError(f"{_name(rollout)}: no generated token")
    if rollout.finish_reason not in FINISH_REASONS:
        raise ValueError(f"{_name(rollout)}: finish_reason {rollout.finish_reason!r}, allowed are {FINISH_REASONS}")
    if rollout.prompt_ids.dtype != np.int32 or rollout.prompt_ids.ndim != 1 or len(rollout.prompt_ids) == 0:
        raise ValueError(
            f"{_name(rollout)}: prompt_ids {rollout.prompt_ids.dtype} {rollout.prompt_ids.shape} must be int32 (P,)"
        )
    fields = {"token_ids": np.int32, "logprobs": np.float32}
    if (rollout.candidate_ids is None) != (rollout.candidate_logprobs is None):
        raise ValueError(f"{_name(rollout)}: candidate_ids and candidate_logprobs must come together")
    if rollout.candidate_ids is not None:
        fields |= {"candidate_ids": np.int32, "candidate_logprobs": np.float32}
        if rollout.candidate_ids.shape != rollout.candidate_logprobs.shape or rollout.candidate_ids.ndim != 2:
            raise ValueError(
                f"{_name(rollout)}: candidate_ids {rollout.candidate_ids.shape} and candidate_logprobs "
                f"{rollout.candidate_logprobs.shape} must both be (R, K)"
            )
        if rollout.candidate_ids.shape[1] == 0:
            raise ValueError(f"{_name(rollout)}: 0 candidates a position; without candidates both arrays are None")
    for field, dtype in fields.items():
        array = getattr(rollout, field)
        if array.dtype != dtype:
            raise ValueError(f"{_name(rollout)}: {field} is {array.dtype}, must be {np.dtype(dtype)}")
        if len(array) != rows:
            raise ValueError(
                f"{_name(rollout)}, position {min(len(array), rows)}: {rows} tokens but {len(array)} rows of {field}"
            )
    routes, tokens = rollout.routes, len(rollout.prompt_ids) + rows
    if routes is not None and (
        routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3 or len(routes) != tokens - 1 or 0 in routes.shape
    ):
        raise ValueError(
            f"{_name(rollout)}: routes are {routes.dtype} {routes.shape}, must be uint8 or uint16 ({tokens - 1}, "
            "layers, top-k): of every token but the last"
        )


def _check_sizes(rollout: Rollout, vocab_size: int) -> None:
    if rollout.candidate_ids is not None and rollout.candidate_ids.shape[1] > vocab_size:
        raise ValueError(f"{_name(rollout)}: {rollout.candidate_ids.shape[1]} candidates, allowed are 1 … {vocab_size}")
    if rollout.prompt_ids.min() < 0 or rollout.prompt_ids.max() >= vocab_size:
        raise ValueError(f"{_name(rollout)}: the prompt holds a token id outside 0 … {vocab_size - 1}")
