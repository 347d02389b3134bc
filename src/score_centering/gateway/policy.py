"""What the gateway decides about a request, whatever the agent asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from score_centering.gateway.http import Refusal
from score_centering.settings.stages import GatewayStage, TrainStage

Mode = Literal["train", "val"]
MODES: tuple[Mode, ...] = ("train", "val")

# What the agent may say: the conversation, its tools, and a shorter response.
PASSED = ("messages", "tools", "parallel_tool_calls")
# The gateway's own to decide, or without meaning here: taken and not looked at.
IGNORED = {
    "model", "temperature", "top_p", "top_k", "seed", "logprobs", "top_logprobs", "user", "metadata", "store",
    "service_tier", "safety_identifier", "prompt_cache_key", "max_tokens", "max_completion_tokens",
}  # fmt: skip
# Anything else changes what is sampled, or how it is returned: only the value that changes nothing is taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto", "none"),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "response_format": ({"type": "text"},),
}
REASONS = {
    "stream": "a streamed response cannot be recorded whole; leave it out and the response comes in one piece",
    "n": "one response a request; ask again for another",
}
SAMPLING_REASON = "the gateway samples from the model's own distribution, which this changes; leave it out"


@dataclass(frozen=True)
class Policy:
    """The sampling that the training configuration forces.

    model: name that the upstream serves.  max_tokens: of a response.  top_logprobs: K candidates a position in `train`
    mode, 0 for none.  `train` samples at `temperature` with top-p 1 and no top-k filter, `val` decodes greedily.
    """

    model: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    top_logprobs: int
    enable_thinking: bool

    @classmethod
    def of(cls, stage: GatewayStage | TrainStage, model: str) -> "Policy":
        rollout = stage.actor_rollout_ref.rollout
        return cls(
            model=model,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=stage.data.max_response_length,
            top_logprobs=stage.score_centering.candidates,
            enable_thinking=stage.prompt.enable_thinking,
        )

    def candidates(self, mode: Mode) -> int:
        """K candidates that are recorded a position."""
        return self.top_logprobs if mode == "train" else 0

    def upstream_request(self, body: Mapping[str, Any], mode: Mode, seed: int | None) -> dict[str, Any]:
        """The request for the upstream: the agent's conversation, the configuration's sampling, ids and log-probs.

        seed: of a task's turn; the agent's own counts where there is no task.

        vLLM lists the sampled token first among the candidates and cuts the list after `top_logprobs` entries, so one
        more than K is asked for: then the K most probable ones are there wherever the sampled token ranks.

        Raises:
            Refusal: 400, naming the field.
        """
        _check(body)
        candidates = self.candidates(mode)
        request = {key: body[key] for key in PASSED if body.get(key) is not None}
        if body.get("tool_choice") is not None:
            request["tool_choice"] = body["tool_choice"]
        request |= {
            "model": self.model,
            "temperature": self.temperature if mode == "train" else 0,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "n": 1,
            "stream": False,
            "max_completion_tokens": self._max_tokens(body),
            "logprobs": True,
            "top_logprobs": candidates + 1 if candidates else 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "chat_template_kwargs": {"enable_thinking": self.enable_thinking},
        }
        seed = body.get("seed") if seed is None else seed
        if seed is not None:
            if type(seed) is not int or not -(2**63) <= seed < 2**63:
                raise Refusal(400, f"seed = {seed!r}: must be a whole number of 64 bits")
            request["seed"] = seed
        return request

    def _max_tokens(self, body: Mapping[str, Any]) -> int:
        limit = self.max_tokens
        for key in ("max_tokens", "max_completion_tokens"):
            value = body.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise Refusal(400, f"{key} = {value!r}: must be a whole number of at least 1")
            limit = min(limit, value)
        return limit


def _check(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise Refusal(400, "messages: must be a list of at least one message")
    for key, value in body.items():
        if value is None or key in PASSED or key in IGNORED:
            continue
        if value not in NEUTRAL.get(key, ()):
            raise Refusal(400, f"{key} = {value!r}: {REASONS.get(key, SAMPLING_REASON)}"[:500])
