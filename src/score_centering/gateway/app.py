"""The gateway: Chat Completions for agents on one side, an OpenAI-compatible server on the other, records in between.

POST /{train,val}/ROLLOUT/v1/chat/completions    one turn of a rollout; ROLLOUT is any name the client chooses
POST /v1/chat/completions                        the same, with `x-rollout-id` and `x-rollout-mode` (default train)
GET  /v1/models, GET /health                     the upstream's
POST /tasks, /tasks/next, /tasks/ID/done         a queue of rollouts between trainer and agents
POST /rollouts/collect                           the records, in wire form; the gateway then forgets them
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from score_centering.gateway.capture import capture, ordinary
from score_centering.gateway.frames import pack
from score_centering.gateway.http import Refusal, RequireKey, error_response, on_refusal, read_json, unless_gone
from score_centering.gateway.policy import MODES, Mode, Policy
from score_centering.gateway.store import Limits, Store
from score_centering.gateway.upstream import Upstream
from score_centering.rollout import wire

MAX_WAIT_SECONDS = 30.0
# Bytes of an upstream's response at most: the text and the prompt's ids, then each token and candidate as JSON.
FIXED_BYTES, ENTRY_BYTES = 16 * 2**20, 192
LONG_BYTES = 2**17


def gateway_app(policy: Policy, upstream: Upstream, key: str, limits: Limits | None = None) -> Starlette:
    """The ASGI application; it closes `upstream` when it ends."""
    gateway = Gateway(policy, upstream, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    session = "/{mode}/{rollout}"
    return Starlette(
        routes=[
            Route("/health", gateway.health),
            *(Route(f"{prefix}/v1/models", gateway.models) for prefix in ("", session)),
            *(Route(f"{prefix}/v1/chat/completions", gateway.chat, methods=["POST"]) for prefix in ("", session)),
            Route("/tasks", gateway.add_tasks, methods=["POST"]),
            Route("/tasks/next", gateway.next_tasks, methods=["POST"]),
            Route("/tasks/{rollout}/done", gateway.finish_task, methods=["POST"]),
            Route("/rollouts/collect", gateway.collect, methods=["POST"]),
        ],
        middleware=[Middleware(RequireKey, key=key)],
        exception_handlers={Refusal: on_refusal},
        lifespan=lifespan,
    )


class Gateway:
    """The handlers and what they share."""

    def __init__(self, policy: Policy, upstream: Upstream, limits: Limits) -> None:
        self._policy = policy
        self._upstream = upstream
        self._limits = limits
        self._store = Store(limits)
        self._requests = 0

    async def chat(self, request: Request) -> Response:
        mode, rollout = _session(request)
        with self._slot():
            body = await read_json(request, self._limits.body_bytes)
            self._policy.upstream_request(body, mode, None)  # refused before it becomes a turn
            turn, seed = self._store.begin_turn(rollout, mode, [body["messages"], body.get("tools")])
            try:
                return await unless_gone(request, self._complete(body, mode, rollout, turn, seed))
            finally:
                self._store.end_turn(rollout)

    async def _complete(self, body: dict[str, Any], mode: Mode, rollout: str, turn: str, seed: int | None) -> Response:
        sent = self._policy.upstream_request(body, mode, seed)
        entries = sent["max_completion_tokens"] * (2 + sent["top_logprobs"])
        content = await self._upstream.chat(sent, FIXED_BYTES + ENTRY_BYTES * entries)
        place = self._store.place(rollout, turn)
        arguments = (content, self._policy.candidates(mode), *place)
        try:
            if len(content) < LONG_BYTES:
                payload, answer = _convert(*arguments)
            else:  # hundreds of megabytes at full scale: other requests go on meanwhile
                payload, answer = await asyncio.to_thread(_convert, *arguments)
        except ValueError as error:
            raise Refusal(502, f"upstream {self._upstream.url}: {error}") from None
        self._store.record(rollout, turn, payload)
        return JSONResponse(answer)

    async def models(self, request: Request) -> Response:
        with self._slot():
            content = await unless_gone(request, self._upstream.models(self._limits.body_bytes))
            return Response(content, media_type="application/json")

    async def health(self, _request: Request) -> Response:
        if await self._upstream.healthy():
            return JSONResponse({"status": "ok"})
        return error_response(503, f"upstream {self._upstream.url} is not healthy")

    async def add_tasks(self, request: Request) -> Response:
        body = await read_json(request, self._limits.body_bytes)
        self._store.add_tasks(body.get("tasks"))
        return JSONResponse({"accepted": len(body["tasks"])}, 202)

    async def next_tasks(self, request: Request) -> Response:
        body = await read_json(request, self._limits.body_bytes)
        count, seconds = body.get("count", 1), _wait_seconds(body)
        if type(count) is not int or count < 1:
            raise Refusal(400, f"count = {count!r}: must be a whole number of at least 1")
        tasks = await unless_gone(request, self._store.next_tasks(count, seconds))
        return JSONResponse({"tasks": [asdict(task) for task in tasks]})

    async def finish_task(self, request: Request) -> Response:
        body = await read_json(request, self._limits.body_bytes)
        error = body.get("error")
        self._store.finish(request.path_params["rollout"], None if error is None else str(error)[:500])
        return Response(status_code=204)

    async def collect(self, request: Request) -> Response:
        body = await read_json(request, self._limits.body_bytes)
        ids = body.get("ids")
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids) or len(set(ids)) < len(ids):
            raise Refusal(400, "ids: must be a list of rollouts' names, each once")
        records = await unless_gone(request, self._store.collect(ids, _wait_seconds(body)))
        if records is None:
            return JSONResponse({"pending": True}, 202)
        length = sum(len(piece) for piece in pack(records))
        headers = {"content-length": str(length)}
        return StreamingResponse(pack(records), media_type="application/octet-stream", headers=headers)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        if self._requests >= self._limits.requests:
            raise Refusal(
                429, f"the gateway serves its limit of {self._limits.requests} requests at once", retry_after=1
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1


def _session(request: Request) -> tuple[Mode, str]:
    """Mode and rollout of a request, from its path or its headers."""
    mode = request.path_params.get("mode") or request.headers.get("x-rollout-mode", "train")
    rollout = request.path_params.get("rollout") or request.headers.get("x-rollout-id", "")
    if mode not in MODES:
        raise Refusal(404 if "mode" in request.path_params else 400, f"mode {mode!r}: choose {' or '.join(MODES)}")
    if not rollout:
        raise Refusal(400, "no rollout named: use the path /train/ROLLOUT/v1 or the header x-rollout-id")
    return mode, rollout


def _wait_seconds(body: dict[str, Any]) -> float:
    seconds = body.get("wait_seconds", 0)
    if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise Refusal(400, f"wait_seconds = {seconds!r}: allowed are 0 … {MAX_WAIT_SECONDS:g}")
    return seconds


def _convert(content: bytes, top_logprobs: int, prompt_index: int, sample_index: int) -> tuple[bytes, dict[str, Any]]:
    """(wire form of the record, ordinary response) of an upstream's body."""
    response = json.loads(content)
    return wire.encode(capture(response, top_logprobs, prompt_index, sample_index)), ordinary(response)
