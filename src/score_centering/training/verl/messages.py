"""What passes between agent loop and rollout server: one request, and the capture record in its answer.

A server's `generate` gets `sampling_params` with the keys of `request` and answers verl's TokenOutput whose
`extra_fields` are those of `answer`; verl's own log-prob lists and stop reasons are not used (the first are Python
lists, the second tell "stop" and "length" not apart).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from score_centering.rollout import Rollout, Sampling

LOGPROBS, IDS, HEAD, REASON = "capture_logprobs", "capture_ids", "capture_head", "capture_finish_reason"


def request(sampling: Sampling, seed: int, top_logprobs: int) -> dict[str, Any]:
    """How one rollout is sampled: the full softmax at `temperature`, or greedily; log-probs at `temperature` in both
    cases. seed: of this rollout alone. top_logprobs: K candidates a position."""
    return {
        "temperature": sampling.temperature,
        "greedy": sampling.greedy,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "seed": seed,
        "top_logprobs": top_logprobs,
    }


def sampling_of(parameters: Mapping[str, Any]) -> Sampling:
    """The `Sampling` inside a request."""
    return Sampling(
        temperature=parameters["temperature"],
        max_tokens=parameters["max_tokens"],
        greedy=parameters["greedy"],
        stop_token_ids=tuple(parameters["stop_token_ids"]),
    )


def answer(rollout: Rollout) -> dict[str, Any]:
    """`extra_fields` of the TokenOutput: logprobs (R,) float32; ids (R, K) int32 and head (R, K) float32, or None."""
    return {
        LOGPROBS: rollout.logprobs,
        IDS: rollout.candidate_ids,
        HEAD: rollout.candidate_logprobs,
        REASON: rollout.finish_reason,
    }


def to_rollout(
    prompt_index: int, sample_index: int, prompt_ids: Sequence[int], token_ids: Sequence[int], fields: Mapping[str, Any]
) -> Rollout:
    """The capture record that a server's answer describes."""
    return Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=fields[LOGPROBS],
        candidate_ids=fields[IDS],
        candidate_logprobs=fields[HEAD],
        finish_reason=fields[REASON],
    )
