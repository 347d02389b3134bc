"""A pool of scoring processes that can be killed."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from score_centering.reward.answers import MAX_ANSWER_CHARS, final_answer
from score_centering.reward.literals import literals_equal
from score_centering.reward.plain import is_plain_math
from score_centering.reward.spelling import one_spelling

START_TIMEOUT_S = 300.0
# A stop signal to the whole process group or job is the trainer's to answer: it still needs its scores.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
WALL_FACTOR = 10.0  # an item's wall-clock limit in units of its processor time: a busy machine changes no verdict


@dataclass(frozen=True)
class ScoreResult:
    """rewards: (N,) float32, 1.0 or 0.0, in the order of the responses.

    errors: responses that were scored 0 because judging them failed or crashed its worker.
    timeouts: responses that were scored 0 because judging them took longer than the deadline.
    """

    rewards: np.ndarray
    errors: int
    timeouts: int


class Scorer:
    """Scores responses in `workers` processes, each item within `timeout_s` seconds of processor time.

    The processes are fresh interpreters (never forks), started when the first answer needs one, and live until
    `close`. A process that hangs or dies is replaced; its item scores 0 and is counted. Safe to call from any thread.
    """

    def __init__(self, workers: int = 1, timeout_s: float = 5.0) -> None:
        if workers < 1:
            raise ValueError(f"workers: {workers} must be at least 1")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: {timeout_s} must be positive seconds")
        self._size = workers
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, responses: Sequence[str], answers: Sequence[str], truncated: Sequence[bool], thinking: Sequence[bool]
    ) -> ScoreResult:
        """Reward of each response against the gold answer of the same index; a truncated response scores 0.

        thinking: whether a response begins inside thinking that its prompt opened (`model.chat.thinking_is_open`).
        """
        if not len(responses) == len(answers) == len(truncated) == len(thinking):
            counts = f"{len(responses)} responses, {len(answers)} answers, {len(truncated)} truncated and"
            raise ValueError(f"{counts} {len(thinking)} thinking flags")
        rewards = np.zeros(len(responses), dtype=np.float32)
        pairs: dict[tuple[str, str], list[int]] = {}
        for index, (response, gold, cut, inside) in enumerate(
            zip(responses, answers, truncated, thinking, strict=True)
        ):
            answer = None if cut else final_answer(response, inside)
            if answer is None:
                continue
            gold = _clip(gold)
            equal = literals_equal(one_spelling(answer), one_spelling(gold))
            if equal is None:
                pairs.setdefault((answer, gold), []).append(index)
            else:
                rewards[index] = equal
        replies = self._run([{"answer": answer, "gold": gold} for answer, gold in pairs])
        errors = timeouts = 0
        for reply, indices in zip(replies, pairs.values(), strict=True):
            rewards[indices] = reply.get("verdict", False)
            timeouts += len(indices) * ("timeout" in reply)
            errors += len(indices) * ("error" in reply or "died" in reply)
        return ScoreResult(rewards, errors, timeouts)

    def are_golds(self, answers: Sequence[str]) -> list[bool]:
        """Whether each answer can be a gold answer; one that cannot be judged in time cannot."""
        spelled = [one_spelling(_clip(answer)) for answer in answers]
        good = [bool(literals_equal(text, text)) or is_plain_math(text) for text in spelled]
        unsure = [index for index, certain in enumerate(good) if not certain]
        replies = self._run([{"gold": _clip(answers[index])} for index in unsure])
        for index, reply in zip(unsure, replies, strict=True):
            good[index] = reply.get("verdict", False)
        return good

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            for worker in self._workers:
                worker.kill()
            self._workers.clear()

    def _run(self, requests: list[dict[str, str]]) -> list[dict[str, Any]]:
        """The reply to each request: {"verdict"}, {"error"}, {"timeout"} or {"died"}."""
        replies: dict[int, dict[str, Any]] = {}
        queue = deque(range(len(requests)))
        with self._lock:
            try:
                while len(replies) < len(requests):
                    self._assign(queue, requests)
                    self._collect(replies)
            finally:
                for worker in [worker for worker in self._workers if worker.item is not None]:
                    self._drop(worker)  # only after an exception: a reply to come would be taken for a later item's
        return [replies[index] for index in range(len(requests))]

    def _assign(self, queue: deque[int], requests: list[dict[str, str]]) -> None:
        """Give every idle worker an item, and start workers while there are more items than workers."""
        for worker in [worker for worker in self._workers if worker.ready and worker.item is None]:
            if not queue:
                return
            if worker.send(requests[queue[0]]):
                worker.item = queue.popleft()
                worker.deadline = time.monotonic() + self._timeout_s * WALL_FACTOR
            else:
                self._drop(worker)  # it died while it was idle
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._size and starting < len(queue):
            self._workers.append(_Worker.start(self._timeout_s))
            starting += 1

    def _collect(self, replies: dict[int, dict[str, Any]]) -> None:
        """Wait for the next reply, death or deadline of a worker, and take in all that have happened."""
        waiting = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            remaining = min(worker.deadline for worker in waiting) - time.monotonic()
            heard = [key.data for key, _ in selector.select(max(remaining, 0.0))]
        for worker in waiting:
            if worker in heard:
                reply = worker.receive()
            elif time.monotonic() >= worker.deadline:
                reply = {"timeout": True}
            else:
                continue
            if reply is None:
                continue
            failed = "timeout" in reply or "died" in reply
            if failed:
                self._drop(worker)
            if worker.item is not None:
                replies[worker.item] = reply
                worker.item = None
            elif failed:
                raise RuntimeError(f"a scoring process did not start: {' '.join(worker.process.args)}")
            else:
                worker.ready = True

    def _drop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.kill()


@dataclass(eq=False)
class _Worker:
    """One process; `item` is the request it works on, `deadline` the monotonic time by which it must reply."""

    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    item: int | None = None
    received: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, timeout_s: float) -> Self:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a new process inherits what is blocked
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "score_centering.reward.worker", str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy's order of terms follows string hashes
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(process, time.monotonic() + START_TIMEOUT_S)

    def send(self, request: dict[str, str]) -> bool:
        """Whether the process was there to take the request."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """A whole reply, {"timeout"} or {"died"} at the end of the stream, or None while a reply is incomplete."""
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        if not chunk:
            return {"timeout": True} if self.process.wait() == -signal.SIGPROF else {"died": True}
        self.received += chunk
        if not self.received.endswith(b"\n"):
            return None
        reply = json.loads(self.received)
        self.received.clear()
        return reply

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def _clip(text: str) -> str:
    """`text`, or enough of a longer one for the worker to refuse it."""
    return text[: MAX_ANSWER_CHARS + 1]
