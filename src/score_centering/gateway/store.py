"""What the gateway remembers: tasks for agents, and the recorded turns of each rollout, all of it bounded."""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from score_centering.gateway.http import Refusal
from score_centering.gateway.policy import MODES, Mode
from score_centering.rollout.streams import streams

MAX_ID_CHARS = 128


@dataclass(frozen=True)
class Limits:
    """What the gateway holds at most; more is refused with 413, 429 or 507.

    requests: at the same time.  body_bytes: of one request.  rollouts: begun and not collected.  turns: of one rollout.
    record_bytes: of all records together, in wire form.
    """

    requests: int = 2048
    body_bytes: int = 4 * 2**20
    rollouts: int = 65_536
    turns: int = 256
    record_bytes: int = 2 * 2**30


@dataclass(frozen=True)
class AgentTask:
    """One rollout for an agent: which problem, and what its record is called.

    seed: int64, the stream of the first turn's uniform numbers.
    """

    id: str
    mode: Mode
    problem: str
    prompt_index: int
    sample_index: int
    seed: int


@dataclass
class Session:
    """A rollout that has begun. turns: wire form by the conversation's digest.  order: number of each turn, by it."""

    mode: Mode
    task: AgentTask | None
    turns: dict[str, bytes] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    active: int = 0
    done: bool = False
    error: str | None = None


class Store:
    """Sessions and tasks. Of one event loop; `changed` wakes whoever waits for a task or for a rollout to end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sessions: dict[str, Session] = {}
        self._tasks: deque[AgentTask] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------- tasks
    def add_tasks(self, entries: Any) -> None:
        """Queues tasks, all or none of them.

        Raises:
            Refusal: 400 for an entry that is no task, 409 for an id in use, 507 when there is no room.
        """
        tasks = _tasks(entries)
        ids = [task.id for task in tasks]
        used = next((id for n, id in enumerate(ids) if id in self._sessions or id in ids[:n]), None)
        if used is not None:
            raise Refusal(409, f"rollout {used!r}: this id is in use")
        self._make_room(len(tasks))
        for task in tasks:
            self._sessions[task.id] = Session(task.mode, task)
        self._tasks.extend(tasks)
        self._notify()

    async def next_tasks(self, count: int, wait_seconds: float) -> list[AgentTask]:
        """Up to `count` tasks; waits for the first one, and comes back with none after `wait_seconds`."""
        await self._wait(lambda: self._tasks, wait_seconds)
        return [self._tasks.popleft() for _ in range(min(count, len(self._tasks)))]

    def finish(self, id: str, error: str | None) -> None:
        """An agent has ended its rollout, with `error` when it could not."""
        session = self._session(id)
        session.done, session.error = True, error
        self._notify()

    # ------------------------------------------------------------------------------------------------------ rollouts
    def begin_turn(self, id: str, mode: Mode, conversation: Sequence[Any]) -> tuple[str, int | None]:
        """Admits a request of a rollout; returns the turn's name and its seed. `end_turn` must follow.

        A conversation that is asked again, as a client does that lost the answer, is the same turn: it has the same
        seed, and its record replaces the first one.
        """
        if not id or len(id) > MAX_ID_CHARS:
            raise Refusal(400, f"the rollout's id must have 1 … {MAX_ID_CHARS} characters")
        session = self._sessions.get(id)
        if session is None:
            self._make_room(1)
            session = self._sessions[id] = Session(mode, None)
        if session.mode != mode:
            raise Refusal(409, f"rollout {id!r} has begun in mode {session.mode}, not {mode}")
        turn = hashlib.sha256(json.dumps(conversation, sort_keys=True).encode()).hexdigest()
        if turn not in session.order and len(session.order) >= self.limits.turns:
            raise Refusal(507, f"rollout {id!r} has reached the limit of {self.limits.turns} turns")
        number = session.order.setdefault(turn, len(session.order))
        session.active += 1
        return turn, None if session.task is None else turn_seed(session.task.seed, number)

    def place(self, id: str, turn: str) -> tuple[int, int]:
        """(prompt index, sample index) of a rollout's records; without a task, (0, number of the turn)."""
        session = self._session(id)
        return (session.task.prompt_index, session.task.sample_index) if session.task else (0, session.order[turn])

    def record(self, id: str, turn: str, payload: bytes) -> None:
        """Keeps the wire form of a turn.

        Raises:
            Refusal: 507 when records have reached their limit.
        """
        session = self._session(id)
        added = len(payload) - len(session.turns.get(turn, b""))
        if self._bytes + added > self.limits.record_bytes:
            raise Refusal(507, f"the records have reached the limit of {self.limits.record_bytes} bytes; collect some")
        session.turns[turn] = payload
        self._bytes += added

    def end_turn(self, id: str) -> None:
        """A request has ended, however it did; a rollout that nobody asked for and that left no record is forgotten."""
        session = self._sessions.get(id)
        if session is None:  # collected meanwhile
            return
        session.active -= 1
        if session.task is None and not session.active and not session.turns:
            del self._sessions[id]
        self._notify()

    async def collect(self, ids: Sequence[str], wait_seconds: float) -> list[list[bytes]] | None:
        """The wire forms of each rollout's turns, which are forgotten; None when some have not ended in time.

        Raises:
            Refusal: 404 for an id that has not begun, 424 when an agent could not end a rollout.
        """
        await self._wait(lambda: self._failed(ids) or all(map(self._ended, ids)), wait_seconds)
        for id in ids:
            if (error := self._session(id).error) is not None:
                raise Refusal(424, f"rollout {id!r}: its agent failed: {error}")
        if not all(map(self._ended, ids)):
            return None
        return [self._forget(id) for id in ids]

    # --------------------------------------------------------------------------------------------------------- parts
    def _ended(self, id: str) -> bool:
        """A task has ended when its agent says so, another rollout when no request of it is on its way."""
        session = self._session(id)
        return not session.active and (session.done or session.task is None)

    def _failed(self, ids: Sequence[str]) -> bool:
        return any(self._session(id).error is not None for id in ids)

    def _forget(self, id: str) -> list[bytes]:
        session = self._sessions.pop(id)
        self._bytes -= sum(map(len, session.turns.values()))
        return [session.turns[turn] for turn in session.order if turn in session.turns]

    def _session(self, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None:
            raise Refusal(404, f"rollout {id!r}: no such rollout, or it was collected already")
        return session

    def _make_room(self, count: int) -> None:
        if len(self._sessions) + count > self.limits.rollouts:
            raise Refusal(507, f"the gateway holds its limit of {self.limits.rollouts} rollouts; collect some")
        if self._bytes >= self.limits.record_bytes:
            raise Refusal(507, f"the records have reached the limit of {self.limits.record_bytes} bytes; collect some")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, condition: Any, seconds: float) -> None:
        """Until `condition()` holds, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            pass


def turn_seed(seed: int, turn: int) -> int:
    """The int64 seed of a rollout's turn: its own for the first one, a hash of it and the turn for the others."""
    if turn == 0:
        return seed
    return to_seed(streams(seed, np.array([turn]), np.array([0])))[0]


def to_seed(stream: np.ndarray) -> list[int]:
    """Streams (N,) uint64 as the int64 numbers that a request's `seed` holds."""
    return stream.view(np.int64).tolist()


def _tasks(entries: Any) -> list[AgentTask]:
    if not isinstance(entries, list):
        raise Refusal(400, "tasks: must be a list")
    return [_task(position, entry) for position, entry in enumerate(entries)]


def _task(position: int, entry: Any) -> AgentTask:
    kinds = {"id": str, "mode": str, "problem": str, "prompt_index": int, "sample_index": int, "seed": int}
    if not isinstance(entry, Mapping) or {name: type(value) for name, value in entry.items()} != kinds:
        raise Refusal(400, f"tasks[{position}]: must hold {', '.join(f'{n} ({k.__name__})' for n, k in kinds.items())}")
    if entry["mode"] not in MODES:
        raise Refusal(400, f"tasks[{position}]: mode {entry['mode']!r}: choose {' or '.join(MODES)}")
    if not 0 < len(entry["id"]) <= MAX_ID_CHARS:
        raise Refusal(400, f"tasks[{position}]: its id must have 1 … {MAX_ID_CHARS} characters")
    if not -(2**63) <= entry["seed"] < 2**63:
        raise Refusal(400, f"tasks[{position}]: seed {entry['seed']} has more than 64 bits")
    return AgentTask(**entry)
