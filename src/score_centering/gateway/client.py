"""The trainer's side of the gateway: rollouts go out as tasks and come back as capture records."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np

from score_centering.gateway.frames import unpack
from score_centering.gateway.policy import Mode
from score_centering.gateway.store import AgentTask, to_seed
from score_centering.rollout import Rollout, wire
from score_centering.rollout.streams import streams
from score_centering.settings import UserError

COLLECTED_AT_ONCE = 64
WAIT_SECONDS = 20.0


def make_tasks(problems: Sequence[str], n: int, mode: Mode, seed: int, name: str) -> list[AgentTask]:
    """n rollouts of each problem, prompt-major, with the streams that an engine's `generate` would give them.

    name: what the ids begin with; it must not come twice while rollouts of that name are under way.
    """
    owner = np.repeat(np.arange(len(problems)), n)
    sample = np.tile(np.arange(n), len(problems))
    seeds = to_seed(streams(seed, owner, sample))
    return [
        AgentTask(f"{name}-{i}-{j}", mode, problems[i], i, j, seed)
        for i, j, seed in zip(owner.tolist(), sample.tolist(), seeds, strict=True)
    ]


class GatewayClient:
    """A client of the gateway at `url`. Use it as an async context manager."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        self._key = key

    async def __aenter__(self) -> "GatewayClient":
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers={"authorization": f"Bearer {self._key}"},
            timeout=httpx.Timeout(None, connect=10),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def submit(self, tasks: Sequence[AgentTask]) -> None:
        """Queue tasks for the agents."""
        await self._post("/tasks", {"tasks": [asdict(task) for task in tasks]}, 202)

    async def collect(self, ids: Sequence[str], vocab_size: int, top_logprobs: int) -> list[list[Rollout]]:
        """The records of each rollout's turns, once all of them have ended; the gateway forgets them.

        Raises:
            UserError: an agent failed, the gateway went away, or a record is not one (oracle 8).
        """
        collected: list[list[Rollout]] = []
        for start in range(0, len(ids), COLLECTED_AT_ONCE):
            part, body = ids[start : start + COLLECTED_AT_ONCE], None
            while body is None:
                body = await self._collect(part)
            try:
                for turns in unpack(body, len(part)):
                    collected.append([wire.decode(payload, vocab_size, top_logprobs) for payload in turns])
            except ValueError as error:
                raise UserError(f"gateway {self._url}: {error}") from None
        return collected

    async def rollouts(self, tasks: Sequence[AgentTask], vocab_size: int, top_logprobs: int) -> list[Rollout]:
        """One record a task, for agents of a single turn, in the tasks' order.

        Raises:
            UserError: as `collect`, or a rollout of another number of turns.
        """
        await self.submit(tasks)
        collected = await self.collect([task.id for task in tasks], vocab_size, top_logprobs)
        for task, turns in zip(tasks, collected, strict=True):
            if len(turns) != 1:
                raise UserError(f"gateway {self._url}: rollout {task.id!r} has {len(turns)} turns, 1 was expected")
        return [turns[0] for turns in collected]

    async def _collect(self, ids: Sequence[str]) -> bytes | None:
        response = await self._post("/rollouts/collect", {"ids": list(ids), "wait_seconds": WAIT_SECONDS}, 200, 202)
        return response.content if response.status_code == 200 else None

    async def _post(self, path: str, body: dict[str, Any], *expected: int) -> httpx.Response:
        try:
            response = await self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise UserError(f"gateway {self._url}: {str(error) or type(error).__name__}") from None
        if response.status_code not in expected:
            raise UserError(f"gateway {self._url}: status {response.status_code}: {_line(response)}")
        return response


def _line(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(response.text.split())[:300]
