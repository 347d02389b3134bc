"""Capture records kept where vLLM makes them: in its worker, one array a step, handed over once a rollout.

vLLM's own way makes Python lists of each position's log-probs, request by request, in the process that schedules. Here
they stay NumPy arrays from the copy off the device to the trainer, and the scheduler is given none.

A request joins by a key in its `SamplingParams.extra_args`; one without a key is answered as ever. `CaptureExtension`
is vLLM's `worker_extension_cls`: `start_capture` puts a recorder around the worker's two methods of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CAPTURE_KEY = "capture_key"
EXTENSION = "score_centering.rollout.vllm_capture.CaptureExtension"


@dataclass
class Recording:
    """What is known of one request.

    Args:
        prompt_length: tokens.
        width: K + 1, the sampled token first.
        rows: of each position the ids (requests, ≥ K + 1) int32 and log-probs float32 of its whole step, and the row of
            both. A step's arrays live until each of its requests is taken.
    """

    prompt_length: int
    width: int
    rows: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)


class Recorder:
    """Follows vLLM's steps: what was scheduled tells which position of which request each sampled token is."""

    def __init__(self) -> None:
        self._running: dict[str, Recording] = {}
        self._kept: dict[str, Recording] = {}

    def scheduled(self, step: Any) -> list[tuple[str, Recording, int]]:
        """vLLM's id, request and output position, from 0, of each recorded token that this SchedulerOutput leads to.

        A request that vLLM preempted is read again, prompt and output, so its position is counted, not remembered.
        """
        for name in step.finished_req_ids:
            self._running.pop(name, None)
        cached = step.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            key = (new.sampling_params.extra_args or {}).get(CAPTURE_KEY)
            if key is not None and new.req_id not in self._running:
                request = Recording(len(new.prompt_token_ids), new.sampling_params.logprobs + 1)
                self._running[new.req_id] = self._kept[key] = request
        places = []
        for name, tokens in step.num_scheduled_tokens.items():
            request = self._running.get(name)
            if request is not None:
                places.append((name, request, computed[name] + tokens - request.prompt_length))
        return places

    def sampled(self, places: Sequence[tuple[str, Recording, int]], output: Any) -> None:
        """Keeps the log-probs of a ModelRunnerOutput, and takes them out of it if every request is recorded.

        Raises:
            ValueError: a position whose predecessor was not seen.
        """
        if output.logprobs is None or not places:
            return
        # copies: the arrays are views of page-locked memory
        ids = np.array(output.logprobs.logprob_token_ids, dtype=np.int32)
        logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
        for name, request, position in places:
            row = output.req_id_to_index[name]
            if not output.sampled_token_ids[row]:  # the prompt goes on in the next step
                continue
            if not 0 <= position <= len(request.rows):
                raise ValueError(f"vllm: position {position} of a rollout of which {len(request.rows)} are recorded")
            request.rows[position : position + 1] = [(ids, logprobs, row)]
        if len(places) == len(output.req_ids):
            output.logprobs = None

    def take(self, keys: Sequence[str]) -> list[dict[str, bytes]]:
        """The records of finished requests (`unpacked` reads them), in the order of `keys`; each can be taken once.

        Raises:
            ValueError: a key that no request had, or that was taken.
        """
        for key in keys:
            if key not in self._kept:
                raise ValueError(f"vllm: no rollout is recorded under {key!r}")
        return [_packed(self._kept.pop(key)) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        """Forgets the records of abandoned requests, which nobody will take; a key may be without one."""
        for key in keys:
            self._kept.pop(key, None)


def _packed(request: Recording) -> dict[str, bytes]:
    """ids (R, K + 1) int32 and log-probs (R, K + 1) float32, row by row, as what any message can carry."""
    width = request.width
    return {
        "ids": b"".join(ids[row, :width].tobytes() for ids, _, row in request.rows),
        "logprobs": b"".join(logprobs[row, :width].tobytes() for _, logprobs, row in request.rows),
    }


def unpacked(record: dict[str, bytes], top_logprobs: int) -> tuple[np.ndarray, np.ndarray]:
    """ids (R, K + 1) int32 and log-probs (R, K + 1) float32 of a record that `take` gave, the sampled token first."""
    width = top_logprobs + 1
    ids = np.frombuffer(record["ids"], dtype=np.int32).reshape(-1, width)
    return ids, np.frombuffer(record["logprobs"], dtype=np.float32).reshape(-1, width)


class CaptureExtension:
    """Joins vLLM's worker class; its methods are called through `collective_rpc`."""

    def start_capture(self) -> None:
        """Called once, when the engine is up."""
        recorder = self._recorder = Recorder()
        execute, sample = self.execute_model, self.sample_tokens
        places: list[tuple[str, Recording, int]] = []

        def execute_model(scheduler_output: Any) -> Any:
            nonlocal places
            places = recorder.scheduled(scheduler_output)
            return _watched(execute(scheduler_output), recorder, places)

        def sample_tokens(grammar_output: Any) -> Any:
            return _watched(sample(grammar_output), recorder, places)

        self.execute_model, self.sample_tokens = execute_model, sample_tokens

    def take_capture(self, keys: list[str]) -> list[dict[str, bytes]]:
        """`Recorder.take`."""
        return self._recorder.take(keys)

    def drop_capture(self, keys: list[str]) -> None:
        """`Recorder.drop`."""
        self._recorder.drop(keys)


def _watched(output: Any, recorder: Recorder, places: list[tuple[str, Recording, int]]) -> Any:
    """A step's output, recorded now, or when vLLM waits for the copy off the device (its asynchronous outputs)."""
    if hasattr(output, "get_output"):
        wait: Callable[[], Any] = output.get_output

        def get_output() -> Any:
            del output.get_output  # it holds the output, which holds it: freed now, not at a collection of garbage
            made = wait()
            recorder.sampled(places, made)
            return made

        output.get_output = get_output
    elif output is not None:
        recorder.sampled(places, output)
    return output
