"""The capture record of one rollout, and the check that every record passes on arrival (oracle 8 of the objective)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from score_centering.rollout.candidates import MIN_LOGPROB
from score_centering.settings import UserError

MAX_HEAD_MASS = 1.001
HEAD_LOGPROB_TOLERANCE = 2e-3  # nats; candidates travel in 16 bits, sampled tokens in FP32
FINISH_REASONS = ("stop", "length")
FIELDS = {  # dtype and axes of each array
    "prompt_ids": ("int32", "P"),
    "token_ids": ("int32", "R"),
    "logprobs": ("float32", "R"),
    "candidate_ids": ("int32", "RK"),
    "candidate_logprobs": ("float32", "RK"),
}
OPTIONAL = ("candidate_ids", "candidate_logprobs", "routes")


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


def sampled_entropy(rollouts: Sequence[Rollout]) -> float:
    """Entropy of the sampler in nats a token: the mean of −log q over all sampled tokens, which is unbiased. NaN
    without a token."""
    logprobs = np.concatenate([np.empty(0, np.float32), *(rollout.logprobs for rollout in rollouts)])
    return -float(logprobs.mean(dtype=np.float64)) if logprobs.size else float("nan")


def mean_response_length(rollouts: Sequence[Rollout]) -> float:
    """Generated tokens a rollout, the stop token included; NaN without a rollout."""
    return sum(len(rollout.token_ids) for rollout in rollouts) / len(rollouts) if rollouts else float("nan")


def validate(rollout: Rollout, vocab_size: int) -> None:
    """Raises UserError, naming rollout and position, when a record can't be what a sampler returned."""
    validate_all([rollout], vocab_size)


def validate_all(rollouts: Sequence[Rollout], vocab_size: int, top_logprobs: int | None = None) -> None:
    """`validate` for a whole batch, in one pass over all its positions.

    Args:
        top_logprobs: K that was asked for (0: no candidates); None: as many as the first record has.
    """
    for rollout in rollouts:
        check_shapes(rollout)
        _check_sizes(rollout, vocab_size)
        asked = _candidates(rollouts[0]) if top_logprobs is None else top_logprobs
        if _candidates(rollout) != asked:
            raise UserError(f"{_name(rollout)}: {_candidates(rollout)} candidates a position, must be {asked}")
    owner = np.repeat(np.arange(len(rollouts)), [len(r.token_ids) for r in rollouts])
    position = np.concatenate([np.arange(len(r.token_ids)) for r in rollouts]) if rollouts else owner

    def refuse(faulty: np.ndarray, what: str) -> None:
        """faulty: one bool a position of the batch; the first one is reported."""
        if faulty.any():
            t = int(faulty.argmax())
            raise UserError(f"{_name(rollouts[owner[t]])}, position {position[t]}: {what}")

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
    unlike = (is_sampled & (gap > HEAD_LOGPROB_TOLERANCE)).any(-1)
    missing = ~is_sampled.any(-1) & (logprobs > head[:, -1] + HEAD_LOGPROB_TOLERANCE)
    refuse(
        unlike | missing,
        "the sampled token's log-prob differs from what the candidates say of it (is a row shifted?)",
    )


def _name(rollout: Rollout) -> str:
    return f"rollout (prompt {rollout.prompt_index}, sample {rollout.sample_index})"


def _candidates(rollout: Rollout) -> int:
    return 0 if rollout.candidate_ids is None else rollout.candidate_ids.shape[1]


def check_shapes(rollout: Rollout) -> None:
    """Raises UserError, naming the rollout, when types, shapes or the finish reason aren't those of a record."""
    for field in ("prompt_index", "sample_index"):
        index = getattr(rollout, field)
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
            raise UserError(f"{_name(rollout)}: {field} is {index!r}, must be a whole number from 0 on")
    if rollout.finish_reason not in FINISH_REASONS:
        raise UserError(f"{_name(rollout)}: finish_reason {rollout.finish_reason!r}, allowed are {FINISH_REASONS}")
    if (rollout.candidate_ids is None) != (rollout.candidate_logprobs is None):
        raise UserError(f"{_name(rollout)}: candidate_ids and candidate_logprobs must come together")
    for field in (*FIELDS, "routes"):
        array = getattr(rollout, field)
        if not isinstance(array, np.ndarray) and not (array is None and field in OPTIONAL):
            raise UserError(f"{_name(rollout)}: {field} is a {type(array).__name__}, must be an array")
    for field, (dtype, axes) in FIELDS.items():
        array = getattr(rollout, field)
        if array is not None and (array.dtype != dtype or array.ndim != len(axes)):
            allowed = f"{dtype} ({', '.join(axes)})"
            raise UserError(f"{_name(rollout)}: {field} is {array.dtype} {array.shape}, must be {allowed}")
    rows = len(rollout.token_ids)
    if rows == 0:
        raise UserError(f"{_name(rollout)}: no generated token")
    if len(rollout.prompt_ids) == 0:
        raise UserError(f"{_name(rollout)}: no prompt token")
    for field in ("logprobs", "candidate_ids", "candidate_logprobs"):
        array = getattr(rollout, field)
        if array is not None and len(array) != rows:
            raise UserError(
                f"{_name(rollout)}, position {min(len(array), rows)}: {rows} tokens but {len(array)} rows of {field}"
            )
    if rollout.candidate_ids is not None and rollout.candidate_ids.shape != rollout.candidate_logprobs.shape:
        raise UserError(
            f"{_name(rollout)}: candidate_ids {rollout.candidate_ids.shape} and candidate_logprobs "
            f"{rollout.candidate_logprobs.shape} must both be (R, K)"
        )
    if rollout.candidate_ids is not None and rollout.candidate_ids.shape[1] == 0:
        raise UserError(f"{_name(rollout)}: 0 candidates a position; without candidates both arrays are None")
    routes, tokens = rollout.routes, len(rollout.prompt_ids) + rows
    if routes is not None and (
        routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3 or len(routes) != tokens - 1 or 0 in routes.shape
    ):
        raise UserError(
            f"{_name(rollout)}: routes are {routes.dtype} {routes.shape}, must be uint8 or uint16 ({tokens - 1}, "
            "layers, top-k): of every token but the last"
        )


def _check_sizes(rollout: Rollout, vocab_size: int) -> None:
    if _candidates(rollout) > vocab_size:
        raise UserError(f"{_name(rollout)}: {_candidates(rollout)} candidates, allowed are 1 … {vocab_size}")
    outside = (rollout.prompt_ids < 0) | (rollout.prompt_ids >= vocab_size)
    if outside.any():
        raise UserError(
            f"{_name(rollout)}, prompt position {int(outside.argmax())}: token id outside 0 … {vocab_size - 1}"
        )
