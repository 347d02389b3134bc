"""What gateway and engine server share: refusals in OpenAI's form, the key, bounded bodies, clients that go away."""

import asyncio
import hmac
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT_GONE = 499  # nobody reads this answer
OPEN_PATHS = ("/health",)

T = TypeVar("T")


class Refusal(Exception):
    """A request that is not served: an HTTP status and one line that says why."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers)


async def on_refusal(_request: Request, refusal: Exception) -> Response:
    """Starlette's exception handler of `Refusal`."""
    assert isinstance(refusal, Refusal)
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    return error_response(refusal.status, refusal.message, headers)


class RequireKey:
    """ASGI middleware: every path but `/health` needs `Authorization: Bearer KEY`, compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refused = error_response(
                    401, "a key is needed: Authorization: Bearer <SC_KEY>", {"www-authenticate": "Bearer"}
                )
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a request body of at most `max_bytes`.

    Raises:
        Refusal: 413 when it is longer, 400 when it is no JSON object.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refusal(413, f"the request body is over the limit of {max_bytes} bytes")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise Refusal(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, "the request body must be a JSON object")
    return content


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes its connection.

    Call it after the body was read. Raises:
        Refusal: `CLIENT_GONE`.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refusal(CLIENT_GONE, "the client closed its connection")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
