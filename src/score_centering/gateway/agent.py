"""The single-turn math agent, a Chat Completions client like any other, and the worker that runs it on tasks."""

import asyncio
from typing import Any

import httpx

from score_centering.data.problems import user_message
from score_centering.settings import UserError

TASKS_AT_ONCE = 256
WAIT_SECONDS = 20.0


async def solve(client: httpx.AsyncClient, base_url: str, problem: str, instruction: str) -> str:
    """Ask for a solution once; the text of the answer.

    base_url: of the rollout's own API, `http://…/train/ROLLOUT/v1`.

    Raises:
        AgentError: the server's own line.
    """
    body = {"model": "policy", "messages": [user_message(problem, instruction)]}
    return (await _post(client, f"{base_url}/chat/completions", body))["choices"][0]["message"]["content"]


class AgentError(UserError):
    """A request of the agent was refused."""


async def work(url: str, key: str, instruction: str, at_once: int = TASKS_AT_ONCE) -> None:
    """Take tasks from the gateway at `url` and solve them, `at_once` side by side, until cancelled.

    Raises:
        AgentError: the gateway cannot be reached, or refuses to hand out tasks.
    """
    running: set[asyncio.Task[None]] = set()
    async with _client(key, at_once) as client:

        async def run(task: dict[str, Any]) -> None:
            error = None
            try:
                await solve(client, f"{url}/{task['mode']}/{task['id']}/v1", task["problem"], instruction)
            except AgentError as failure:
                error = str(failure)
            await _post(client, f"{url}/tasks/{task['id']}/done", {"error": error})

        try:
            while True:
                request = {"count": at_once - len(running), "wait_seconds": WAIT_SECONDS}
                tasks = (await _post(client, f"{url}/tasks/next", request))["tasks"]
                running |= {asyncio.create_task(run(task)) for task in tasks}
                if running:
                    full = len(running) >= at_once
                    ended, running = await asyncio.wait(
                        running, timeout=None if full else 0, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _client(key: str, at_once: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(None, connect=10),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=at_once),
        trust_env=False,
    )


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Any:
    try:
        response = await client.post(url, json=body)
    except httpx.TransportError as error:
        raise AgentError(f"{url}: {str(error) or type(error).__name__}") from None
    if response.status_code == 204:
        return None
    if response.status_code != 200:
        raise AgentError(f"{url}: status {response.status_code}: {response.text[:300]}")
    return response.json()
