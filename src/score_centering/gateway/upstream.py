"""The OpenAI-compatible server behind the gateway: one deadline a request, bounded retries, bounded responses."""

import asyncio
import json
from itertools import cycle
from typing import Any

import httpx

from score_centering.gateway.http import Refusal

RETRIED = (408, 409, 429)  # and every 5xx
CONNECT_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 8.0
CLIENTS = 64  # they take turns: httpx looks through all connections of a client at each request


class Upstream:
    """A client of the upstream at `url` (without `/v1`).

    timeout_seconds: of one attempt, from connecting to the last byte.  attempts: at most, the first one included.
    backoff_seconds: pause after the first failed attempt; it doubles, up to 8 s, unless the upstream names one.
    """

    def __init__(
        self, url: str, key: str, timeout_seconds: float, attempts: int = 5, backoff_seconds: float = 0.25
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts
        self._backoff_seconds = backoff_seconds
        context = httpx.create_ssl_context()
        self._clients = [
            httpx.AsyncClient(
                base_url=self.url,
                headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
                trust_env=False,
                verify=context,
            )
            for _ in range(CLIENTS)
        ]
        self._turns = cycle(self._clients)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def chat(self, request: dict[str, Any], max_bytes: int) -> bytes:
        """The response to a chat completion, as it came.

        Raises:
            Refusal: the upstream's own refusal; 429, 502 or 504 once every attempt has failed.
        """
        body = json.dumps(request).encode()
        return await self._persistent("POST", "/v1/chat/completions", max_bytes, body)

    async def models(self, max_bytes: int) -> bytes:
        return await self._persistent("GET", "/v1/models", max_bytes)

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return (await next(self._turns).get("/health")).status_code == 200
        except (httpx.HTTPError, TimeoutError):
            return False

    async def _persistent(self, method: str, path: str, max_bytes: int, body: bytes | None = None) -> bytes:
        for attempt in range(1, self._attempts + 1):
            pause = min(self._backoff_seconds * 2 ** (attempt - 1), MAX_BACKOFF_SECONDS)
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    status, headers, content = await self._once(method, path, max_bytes, body)
            except TimeoutError:
                raise Refusal(
                    504, f"upstream {self.url}: no answer in {self._timeout_seconds:g} s (SC_UPSTREAM_TIMEOUT_SECONDS)"
                ) from None
            except httpx.TransportError as error:
                failure = Refusal(502, f"upstream {self.url}: {str(error) or type(error).__name__}")
            else:
                if status == 200:
                    return content
                failure = self._refusal(status, content)
                if status not in RETRIED and status < 500:
                    raise failure
                pause = _asked_pause(headers, pause)
            if attempt < self._attempts:
                await asyncio.sleep(pause)
        raise Refusal(failure.status, f"{failure.message} ({self._attempts} attempts)", failure.retry_after)

    async def _once(
        self, method: str, path: str, max_bytes: int, body: bytes | None
    ) -> tuple[int, httpx.Headers, bytes]:
        headers = {"content-type": "application/json"} if body is not None else {}
        async with next(self._turns).stream(method, path, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > max_bytes:
                    raise Refusal(502, f"upstream {self.url}: its response is over the limit of {max_bytes} bytes")
            return response.status_code, response.headers, bytes(content)

    def _refusal(self, status: int, content: bytes) -> Refusal:
        """An upstream's error for the agent: its own 4xx, except where the gateway itself is at fault."""
        line = f"upstream {self.url}: status {status}: {_message(content)}"
        if status in (401, 403):
            return Refusal(502, f"{line} (the upstream must take the gateway's SC_KEY)")
        if status == 429:
            return Refusal(429, line, retry_after=1)
        return Refusal(status if 400 <= status < 500 else 502, line)


def _asked_pause(headers: httpx.Headers, default: float) -> float:
    """Seconds of a `retry-after` header, bounded; `default` when there is none in seconds."""
    value = headers.get("retry-after", "")
    return min(float(value), MAX_BACKOFF_SECONDS) if value.isdecimal() else default


def _message(content: bytes) -> str:
    """The message of an error body, in one line."""
    try:
        body = json.loads(content)
        text = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode(errors="replace")
    return " ".join(text.split())[:300] or "no message"
