"""What vLLM's worker records, step by step, whatever its scheduler does: a model of that scheduler as the reference."""

import gc
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from score_centering.rollout.vllm_capture import CAPTURE_KEY, CaptureExtension, Recorder, unpacked

K = 3


@dataclass
class Served:
    """A request as the scheduler knows it. given: the rows that its tokens were answered with."""

    name: str
    prompt: int
    length: int
    key: str | None
    top: int
    given: list[tuple[list[int], list[float]]] = field(default_factory=list)
    computed: int = 0
    known: bool = False

    @property
    def done(self) -> bool:
        return len(self.given) == self.length


class Scheduler:
    """Schedules some of its requests a step, reads a prompt in parts, preempts, and tells who has finished."""

    def __init__(self, requests: list[Served], draw, resumed_as_new: bool) -> None:
        self.requests, self.draw, self.resumed_as_new = requests, draw, resumed_as_new
        self.finished: set[str] = set()
        self.values = np.random.default_rng(0)

    def step(self):
        """SchedulerOutput, ModelRunnerOutput, and the requests whose token of this step counts."""
        scheduled, new, cached = {}, [], []
        for request in self.requests:
            if request.done or not self.draw(st.booleans()):
                continue
            if request.known and request.given and self.draw(st.integers(0, 4)) == 0:
                request.computed = 0  # preempted and resumed: prompt and output are read again
                request.known = not self.resumed_as_new
            left = request.prompt + len(request.given) - request.computed
            scheduled[request.name] = self.draw(st.integers(1, left))
            parameters = SimpleNamespace(
                extra_args=request.key and {CAPTURE_KEY: request.key, "other": 1}, logprobs=request.top
            )
            seen = SimpleNamespace(
                req_id=request.name, prompt_token_ids=[0] * request.prompt, sampling_params=parameters,
                num_computed_tokens=request.computed,
            )  # fmt: skip
            (cached if request.known else new).append(seen)
        planned = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.req_id for r in cached], num_computed_tokens=[r.num_computed_tokens for r in cached]
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=self.finished,
        )
        self.finished = set()
        names = self.draw(st.permutations(list(scheduled)))
        ids = self.values.integers(0, 100, (len(names), K + 1))
        logprobs = -self.values.random((len(names), K + 1))
        by_name = {request.name: request for request in self.requests}
        sampled = []
        for row, name in enumerate(names):
            request = by_name[name]
            request.known = True
            request.computed += scheduled[name]
            read = request.computed == request.prompt + len(request.given)
            # a token that the scheduler throws away, because it preempted the request meanwhile
            kept = read and self.draw(st.integers(0, 4)) > 0
            sampled.append([int(ids[row, 0])] if read else [])
            if kept:
                width = request.top + 1
                request.given.append((ids[row, :width].tolist(), logprobs[row, :width].astype(np.float32).tolist()))
                if request.done:
                    self.finished.add(name)
            elif read:
                request.computed = 0
        output = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=SimpleNamespace(logprob_token_ids=ids, logprobs=logprobs) if names else None,
        )
        return planned, output


requests = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from([True, True, True, False]), st.integers(0, K)),
    min_size=1,
    max_size=4,
)


@given(requests, st.booleans(), st.booleans(), st.data())
def test_every_token_has_the_row_it_was_sampled_from(sizes, asynchronous, resumed_as_new, data):
    served = [
        Served(f"{i}-internal", prompt, length, f"key{i}" if recorded else None, top)
        for i, (prompt, length, recorded, top) in enumerate(sizes)
    ]
    scheduler, recorder, waiting = Scheduler(served, data.draw, resumed_as_new), Recorder(), []
    for _ in range(100):
        planned, output = scheduler.step()
        waiting.append((recorder.scheduled(planned), output))
        if not asynchronous or len(waiting) > 1:
            places, output = waiting.pop(0)
            had = output.logprobs
            unrecorded = any(request.key is None for request in served if request.name in output.req_ids)
            recorder.sampled(places, output)
            assert output.logprobs is (had if unrecorded else None)
    for places, output in waiting:
        recorder.sampled(places, output)
    recorded = [request for request in served if request.key and request.done]
    for request, record in zip(recorded, recorder.take([r.key for r in recorded]), strict=True):
        ids, logprobs = unpacked(record, request.top)
        assert ids.tolist() == [row for row, _ in request.given]
        assert logprobs.tolist() == [row for _, row in request.given]
    for request in recorded:
        with pytest.raises(ValueError, match=f"^vllm: no rollout is recorded under '{request.key}'"):
            recorder.take([request.key])
    if recorded and all(request.done for request in served):
        names = {request.name for request in served}
        empty = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        recorder.scheduled(
            SimpleNamespace(
                scheduled_new_reqs=[], scheduled_cached_reqs=empty, num_scheduled_tokens={}, finished_req_ids=names
            )
        )
        assert not recorder._running, "what is finished is let go"


def plan(name: str, computed: int, tokens: int, new: bool):
    parameters = SimpleNamespace(extra_args={CAPTURE_KEY: "k"}, logprobs=0)
    request = SimpleNamespace(
        req_id=name, prompt_token_ids=[1, 2], sampling_params=parameters, num_computed_tokens=computed
    )
    return SimpleNamespace(
        scheduled_new_reqs=[request] if new else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[] if new else [name], num_computed_tokens=[] if new else [computed]
        ),
        num_scheduled_tokens={name: tokens},
        finished_req_ids=set(),
    )


def answer(token: int):
    return SimpleNamespace(
        req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[token]],
        logprobs=SimpleNamespace(logprob_token_ids=np.array([[token]]), logprobs=np.array([[-1.0]])),
    )  # fmt: skip


@pytest.mark.parametrize(("computed", "position"), [(3, 2), (0, -1)])
def test_a_position_without_its_predecessor_is_an_error(computed, position):
    recorder = Recorder()
    recorder.sampled(recorder.scheduled(plan("a", 0, 2, True)), answer(5))
    with pytest.raises(ValueError, match=rf"^vllm: position {position} of a rollout of which 1 are recorded"):
        recorder.sampled(recorder.scheduled(plan("a", computed, 1, False)), answer(6))


class Worker(CaptureExtension):
    """vLLM's worker, as the extension sees it: a step is two calls, and the answer may have to be waited for."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous, self.tokens = asynchronous, iter((5, 6))

    def execute_model(self, scheduler_output) -> None:
        return None

    def sample_tokens(self, grammar_output):
        made = answer(next(self.tokens))
        return SimpleNamespace(get_output=lambda: made) if self.asynchronous else made


def test_a_step_s_output_is_let_go_without_a_collection_of_garbage():
    class Output:
        def get_output(self):
            return answer(5)

    worker = Worker(True)
    worker.sample_tokens = lambda grammar_output: Output()
    worker.start_capture()
    worker.execute_model(plan("a", 0, 2, True))
    output = worker.sample_tokens(None)
    last = weakref.ref(output)
    gc.disable()
    try:
        assert output.get_output().logprobs is None
        del output
        assert last() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_extension_records_at_the_worker_s_own_calls(asynchronous):
    worker = Worker(asynchronous)
    worker.start_capture()
    outputs = []
    for step in (plan("a", 0, 2, True), plan("a", 2, 1, False)):
        assert worker.execute_model(step) is None
        outputs.append(worker.sample_tokens(None))
    for output in outputs:
        assert (output.get_output() if asynchronous else output).logprobs is None
    ids, logprobs = unpacked(worker.take_capture(["k"])[0], 0)
    assert ids.tolist() == [[5], [6]] and logprobs.tolist() == [[-1.0], [-1.0]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abandoned_request_leaves_nothing_behind(asynchronous):
    worker = Worker(asynchronous)
    worker.start_capture()
    worker.execute_model(plan("a", 0, 2, True))
    output = worker.sample_tokens(None)
    worker.drop_capture(["k", "never seen"])
    if asynchronous:
        output.get_output()  # a step that was under way when the request was abandoned
    with pytest.raises(ValueError, match="no rollout is recorded under 'k'"):
        worker.take_capture(["k"])
    worker.execute_model(SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={}, finished_req_ids={"a"},
    ))  # fmt: skip
    assert (worker._recorder._kept, worker._recorder._running) == ({}, {})
