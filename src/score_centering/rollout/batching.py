"""Concurrent requests become engine calls: they wait in a queue, and the thread that owns the engine serves it."""

import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from score_centering.rollout.engine import Sampling, StreamEngine
from score_centering.rollout.record import Rollout

QUIET_SECONDS = 0.02  # a batch is closed when no request has come for this long
GATHER_SECONDS = 0.5  # or after this long


@dataclass(frozen=True)
class Request:
    """One completion. stream: uint64 that names its uniform numbers.  result: set by the engine's thread."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: int
    top_logprobs: int
    result: "Future[Rollout]" = field(default_factory=Future)


class Full(Exception):
    """The queue has reached its limit."""


class Batcher:
    """The queue between a server's event loop and the engine. `submit` is safe to call from any thread.

    A request's tokens depend on nothing but the weights and the request (the engine's promise), so how requests fall
    into batches changes nothing.
    """

    def __init__(self, engine: StreamEngine, max_waiting: int = 8192) -> None:
        self._engine = engine
        self._queue: queue.Queue[Request | None] = queue.Queue()
        self._max_waiting = max_waiting
        self._held: list[Request] = []  # taken from the queue, of another kind than the last batch

    def submit(self, request: Request) -> None:
        """Queues a request; cancelling its `result` takes it out again, unless it is being computed.

        Raises:
            Full: as many requests wait as may.
        """
        if self._queue.qsize() >= self._max_waiting:
            raise Full
        self._queue.put(request)

    def serve_until(self, done: "Future[object]") -> None:
        """Computes what comes, in the calling thread, until `done` is.

        Raises:
            Whatever the engine raises, once the requests of that batch have been told.
        """
        done.add_done_callback(lambda _: self._queue.put(None))
        while not done.done():
            batch = self._next_batch()
            if batch:
                self._compute(batch)

    def _next_batch(self) -> list[Request]:
        """Requests of one kind (sampling and K), in the order they came; none after a wake-up."""
        if not self._held:
            first = self._queue.get()
            if first is None:
                return []
            self._held.append(first)
        self._gather()
        kind = _kind(self._held[0])
        batch = [request for request in self._held if _kind(request) == kind]
        self._held = [request for request in self._held if _kind(request) != kind]
        return [request for request in batch if request.result.set_running_or_notify_cancel()]

    def _gather(self) -> None:
        deadline = time.monotonic() + GATHER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                request = self._queue.get(timeout=min(QUIET_SECONDS, left))
            except queue.Empty:
                return
            if request is None:
                return
            self._held.append(request)

    def _compute(self, batch: list[Request]) -> None:
        prompts = sorted({request.prompt for request in batch})
        batch = sorted(batch, key=lambda request: request.prompt)
        number = {prompt: i for i, prompt in enumerate(prompts)}
        try:
            rollouts = self._engine.generate_streams(
                prompts,
                np.array([number[request.prompt] for request in batch]),
                np.array([request.stream for request in batch], dtype=np.uint64),
                batch[0].sampling,
                batch[0].top_logprobs,
            )
        except Exception as error:
            for request in batch:
                request.result.set_exception(error)
            raise
        for request, rollout in zip(batch, rollouts, strict=True):
            request.result.set_result(rollout)


def _kind(request: Request) -> tuple[Sampling, int]:
    return request.sampling, request.top_logprobs
