"""An OpenAI-compatible server over the local engine, with vLLM's fields for token ids and log-probs."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from score_centering.gateway.http import Refusal, RequireKey, on_refusal, read_json, unless_gone
from score_centering.rollout import Rollout, Sampling
from score_centering.rollout.batching import Batcher, Full, Request

MAX_BODY_BYTES = 4 * 2**20


@dataclass(frozen=True)
class ServedModel:
    """What a server tells of its engine's model, and how text becomes tokens.

    encode: messages ({"role", "content"}) and whether to think → prompt ids.  decode: token ids → text without special
    tokens.
    """

    name: str
    encode: Callable[[Sequence[Mapping[str, str]], bool], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    max_prompt_length: int
    max_response_length: int


def serving_app(model: ServedModel, batcher: Batcher, key: str) -> Starlette:
    """The ASGI application; somebody must serve `batcher`."""
    server = _Server(model, batcher)
    return Starlette(
        routes=[
            Route("/health", server.health),
            Route("/v1/models", server.models),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
        ],
        middleware=[Middleware(RequireKey, key=key)],
        exception_handlers={Refusal: on_refusal},
    )


class _Server:
    def __init__(self, model: ServedModel, batcher: Batcher) -> None:
        self._model = model
        self._batcher = batcher

    async def health(self, _request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model.name, "object": "model"}]})

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_json(http, MAX_BODY_BYTES)
        request = to_request(body, self._model)
        try:
            self._batcher.submit(request)
        except Full:
            raise Refusal(429, "the engine's queue is full", retry_after=1) from None
        rollout = await unless_gone(http, _result(request))
        return JSONResponse(to_response(rollout, body, self._model))


async def _result(request: Request) -> Rollout:
    try:
        return await asyncio.wrap_future(request.result)
    except ValueError as error:  # the engine's own line
        raise Refusal(500, str(error)) from None


def to_request(body: Mapping[str, Any], model: ServedModel) -> Request:
    """The engine's request of a Chat Completions body.

    Raises:
        Refusal: 404 for another model, 400 for a field this server does not have, or a prompt that is too long.
    """
    if body.get("model") != model.name:
        raise Refusal(404, f"model {body.get('model')!r}: this server has {model.name!r}")
    neutral = {
        "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
        "frequency_penalty": (0,), "n": (1,), "stream": (False,), "tools": ([],), "stop": ([],),
    }  # fmt: skip
    for name, allowed in neutral.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise Refusal(400, f"{name} = {body[name]!r}: this server takes {allowed[0]!r} only"[:500])
    thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
    prompt = tuple(model.encode(_messages(body), bool(thinking)))
    if not 1 <= len(prompt) <= model.max_prompt_length:
        raise Refusal(400, f"the prompt has {len(prompt)} tokens, allowed are 1 … {model.max_prompt_length}")
    temperature = _number(body, "temperature", 1.0, 0, 1000)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or model.max_response_length
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise Refusal(400, f"seed = {seed!r}: must be a whole number of 64 bits")
    return Request(
        prompt=prompt,
        sampling=Sampling(
            temperature=temperature or 1.0,
            max_tokens=_whole("max_completion_tokens", limit, 1, model.max_response_length),
            greedy=temperature == 0,
            stop_token_ids=model.stop_token_ids,
        ),
        stream=secrets.randbits(64) if seed is None else seed % 2**64,
        top_logprobs=min(_whole("top_logprobs", body.get("top_logprobs") or 0, 0, 2**31), model.vocab_size),
    )


def to_response(rollout: Rollout, body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """A ChatCompletion object; with log-probs and token ids as far as `body` asks for them."""
    message = {"role": "assistant", "content": model.decode(rollout.token_ids.tolist())}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": rollout.finish_reason,
        "logprobs": {"content": _logprobs(rollout)} if body.get("logprobs") else None,
    }
    prompt, generated = len(rollout.prompt_ids), len(rollout.token_ids)
    response: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    if body.get("return_token_ids"):
        response["prompt_token_ids"] = rollout.prompt_ids.tolist()
        choice["token_ids"] = rollout.token_ids.tolist()
    return response


def _logprobs(rollout: Rollout) -> list[dict[str, Any]]:
    """A float32 has a short decimal form as a double, so ids and log-probs survive JSON to the last bit."""
    sampled = [_entry(*pair) for pair in zip(rollout.token_ids.tolist(), rollout.logprobs.tolist(), strict=True)]
    if rollout.candidate_ids is None or rollout.candidate_logprobs is None:
        return [{**entry, "top_logprobs": []} for entry in sampled]
    heads = zip(rollout.candidate_ids.tolist(), rollout.candidate_logprobs.tolist(), strict=True)
    tops = [[_entry(id, logprob) for id, logprob in zip(ids, values, strict=True)] for ids, values in heads]
    return [{**entry, "top_logprobs": top} for entry, top in zip(sampled, tops, strict=True)]


def _entry(id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{id}", "logprob": logprob, "bytes": None}


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages: must be a list of at least one message")
    return [_message(position, message) for position, message in enumerate(messages)]


def _message(position: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, f"messages[{position}]: must hold a role and a content")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Refusal(400, f"messages[{position}]: its content must be text")
    return {"role": message["role"], "content": content}


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise Refusal(400, f"{name} = {value!r}: allowed are {low:g} … {high:g}")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Refusal(400, f"{name} = {value!r}: allowed are {low} … {high}")
    return value
