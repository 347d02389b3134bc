"""Requests in any order, of several prompts and kinds, each get the rollout of their own prompt and stream."""

from concurrent.futures import Future

from score_centering.rollout import Sampling
from score_centering.rollout.batching import Batcher, Request

ONE, OTHER = Sampling(1.0, 4, False, (9,)), Sampling(1.0, 8, False, (9,))


class Engine:
    """Answers with what it was asked, and holds its callers to its contract: owners rise, every prompt occurs."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate_streams(self, prompts, owner, stream, sampling, top_logprobs):
        assert owner.tolist() == sorted(owner.tolist()) and set(owner.tolist()) == set(range(len(prompts)))
        self.batches.append(len(owner))
        return [(prompts[i], number, sampling.max_tokens) for i, number in zip(owner, stream.tolist(), strict=True)]


def test_each_request_gets_its_own_answer():
    engine = Engine()
    batcher, done = Batcher(engine), Future()
    asked = [((8,), ONE, 1), ((5, 6), ONE, 2), ((8,), OTHER, 3), ((8,), ONE, 4), ((5, 6), OTHER, 2**63), ((7,), ONE, 6)]
    requests = [Request(prompt, sampling, stream, 0) for prompt, sampling, stream in asked]
    for request in requests:
        batcher.submit(request)
    requests[4].result.add_done_callback(lambda _: done.set_result(None))  # of the last batch
    batcher.serve_until(done)
    assert [request.result.result() for request in requests] == [
        (prompt, stream, sampling.max_tokens) for prompt, sampling, stream in asked
    ]
    assert engine.batches == [4, 2], "requests of one kind are decoded together"
