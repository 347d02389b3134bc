"""From an upstream's response to the capture record of the rollout and the ordinary response for the agent."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from score_centering.rollout import Rollout
from score_centering.rollout.candidates import round_logprobs

TOKEN_PREFIX = "token_id:"
RESPONSE_FIELDS = ("id", "object", "created", "model", "usage", "system_fingerprint", "service_tier")
FINISH_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length"}


def capture(response: Mapping[str, Any], top_logprobs: int, prompt_index: int, sample_index: int) -> Rollout:
    """The record of a response with token ids and log-probs, as vLLM's server gives it.

    A token comes as `token_id:<id>` beside its text's bytes, and the sampled one among the candidates as well. Kept are
    ids, the sampled token's log-prob apart, and of the candidates the `top_logprobs` most probable ones, each once.

    Raises:
        ValueError: a response that lacks them, or whose lists disagree; the line says what is missing.
    """
    try:
        (choice,) = response["choices"]
        tokens = np.asarray(choice["token_ids"], dtype=np.int32)
        prompt = np.asarray(response["prompt_token_ids"], dtype=np.int32)
        positions = choice["logprobs"]["content"]
        named = [_token_id(position) for position in positions]
        logprobs = np.array([position["logprob"] for position in positions], dtype=np.float32)
        heads = [_head(position, top_logprobs) for position in positions] if top_logprobs else []
        reason = FINISH_REASONS[choice["finish_reason"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "the upstream's response is no completion with token ids and log-probs "
            f"({type(error).__name__}: {error}); is it vLLM's server, or the local engine's?"
        ) from None
    if len(tokens) == 0 or named != tokens.tolist():
        raise ValueError(
            f"the upstream's response has {len(tokens)} token ids and log-probs of {len(named)} other tokens"
        )
    for position, head in enumerate(heads):
        if len(head) < top_logprobs:
            raise ValueError(
                f"the upstream's response has {len(head)} candidates at position {position}, {top_logprobs} were "
                "asked for (vLLM: --max-logprobs of at least one more)"
            )
    candidates = np.array(heads, dtype=np.float64).reshape(len(heads), top_logprobs, 2)
    return Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=np.minimum(logprobs, np.float32(0)),
        candidate_ids=candidates[..., 0].astype(np.int32) if top_logprobs else None,
        candidate_logprobs=_on_grid(candidates[..., 1]) if top_logprobs else None,
        finish_reason=reason,
    )


def ordinary(response: Mapping[str, Any]) -> dict[str, Any]:
    """The response as any Chat Completions server gives it: no token ids, no log-probs."""
    (choice,) = response["choices"]
    plain = {key: response[key] for key in RESPONSE_FIELDS if key in response}
    kept = {"index": 0, "message": choice["message"], "finish_reason": choice["finish_reason"], "logprobs": None}
    return {**plain, "choices": [kept]}


def _on_grid(logprobs: np.ndarray) -> np.ndarray:
    return round_logprobs(np.minimum(logprobs, 0.0).astype(np.float32))


def _token_id(entry: Mapping[str, Any]) -> int:
    token = entry["token"]
    if not token.startswith(TOKEN_PREFIX):
        raise ValueError(f"token {token!r} is not in the form {TOKEN_PREFIX}<id>")
    return int(token[len(TOKEN_PREFIX) :])


def _head(position: Mapping[str, Any], count: int) -> list[tuple[int, float]]:
    """The `count` most probable candidates of a position, (id, log-prob), each id once, by descending log-prob."""
    entries: dict[int, float] = {}
    for entry in position["top_logprobs"]:
        entries.setdefault(_token_id(entry), entry["logprob"])
    return sorted(entries.items(), key=lambda item: -item[1])[:count]
