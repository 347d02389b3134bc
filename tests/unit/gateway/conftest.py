"""A gateway with a real server behind it, whose engine is cheap: tokens are a hash of prompt and stream."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway_calls import POLICY as SCRIPTED
from score_centering.gateway.app import gateway_app
from score_centering.gateway.policy import Policy
from score_centering.gateway.running import Background
from score_centering.gateway.serving import ServedModel, serving_app
from score_centering.gateway.store import Limits
from score_centering.gateway.upstream import Upstream
from score_centering.rollout import Rollout, Sampling
from score_centering.rollout.batching import Batcher
from score_centering.rollout.candidates import round_logprobs

KEY, VOCABULARY, K = "a key", 300, 5
STOP = 299
MODEL = ServedModel(
    name="tiny",
    encode=lambda messages, thinking: [thinking + 0, *"|".join(message["content"] for message in messages).encode()],
    decode=lambda ids: " ".join(map(str, ids)),
    stop_token_ids=(STOP,),
    vocab_size=VOCABULARY,
    max_prompt_length=400,
    max_response_length=12,
)
POLICY = Policy(
    model="tiny", temperature=0.5, top_p=1, top_k=-1, max_tokens=8, top_logprobs=K, enable_thinking=True
)  # fmt: skip


class HashEngine:
    """Rollouts whose every number is a function of prompt, stream, sampling and K."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.samplings: set[Sampling] = set()
        self.blocked: threading.Event | None = None

    def generate_streams(self, prompts, owner, stream, sampling, top_logprobs) -> list[Rollout]:
        if self.blocked is not None:
            self.blocked.wait()
        self.batches.append(len(owner))
        self.samplings.add(sampling)
        pairs = zip(owner.tolist(), stream.tolist(), strict=True)
        return [self.rollout(prompts[i], key, sampling, top_logprobs) for i, key in pairs]

    @staticmethod
    def rollout(prompt: Sequence[int], stream: int, sampling: Sampling, top_logprobs: int) -> Rollout:
        words = [*prompt, 0 if sampling.greedy else stream % 2**32, 0 if sampling.greedy else stream >> 32]
        rng = np.random.default_rng(words)
        length = int(rng.integers(1, sampling.max_tokens + 1))
        logits = rng.normal(size=(length, VOCABULARY)) * 3 / sampling.temperature
        logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        tokens = logprobs.argmax(1) if sampling.greedy else rng.integers(0, VOCABULARY - 1, length)
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :top_logprobs].astype(np.int32)
        head = round_logprobs(np.take_along_axis(logprobs, ids.astype(np.int64), 1))
        return Rollout(
            prompt_index=0,
            sample_index=0,
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            token_ids=tokens.astype(np.int32),
            logprobs=np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0],
            candidate_ids=ids if top_logprobs else None,
            candidate_logprobs=head if top_logprobs else None,
            finish_reason="length" if length == sampling.max_tokens else "stop",
        )


def equal_rollouts(first: Rollout, second: Rollout) -> bool:
    """Equal to the last bit."""
    fields = ("prompt_ids", "token_ids", "logprobs", "candidate_ids", "candidate_logprobs")
    equal = [np.array_equal(getattr(first, field), getattr(second, field)) for field in fields]
    return all(equal) and first.finish_reason == second.finish_reason


@dataclass
class Stack:
    """A gateway, its upstream over `engine`, and the loop they run on."""

    background: Background
    engine: HashEngine
    batcher: "CountingBatcher"
    upstream: str
    url: str


class CountingBatcher(Batcher):
    """Knows how many requests it was given."""

    def __init__(self, engine: HashEngine) -> None:
        super().__init__(engine)
        self._count = 0

    def submit(self, request) -> None:
        super().submit(request)
        self._count += 1

    def submitted(self) -> int:
        return self._count


@pytest.fixture
def background() -> Iterator[Background]:
    with Background() as running:
        yield running


@pytest.fixture
def engine_server(background) -> Iterator[tuple[str, HashEngine, CountingBatcher]]:
    """The server over a `HashEngine`, which a thread serves until the test ends."""
    engine = HashEngine()
    batcher = CountingBatcher(engine)
    url = background.serve(serving_app(MODEL, batcher, KEY))
    done: Future[None] = Future()
    thread = threading.Thread(target=batcher.serve_until, args=(done,))
    thread.start()
    yield url, engine, batcher
    if engine.blocked is not None:
        engine.blocked.set()
    done.set_result(None)
    thread.join()


@pytest.fixture
def open_gateway(background):
    """`open_gateway(upstream URL, limits=…, policy=…, …)` → the URL of a gateway in front of it."""

    def open_one(upstream: str, *, policy: Policy = POLICY, limits: Limits | None = None, **options) -> str:
        options = {"timeout_seconds": 500.0, "backoff_seconds": 0.01} | options

        async def make() -> Upstream:
            return Upstream(upstream, KEY, **options)

        client = background.submit(make()).result()
        return background.serve(gateway_app(policy, client, KEY, limits))

    return open_one


@pytest.fixture
def stack(background, engine_server, open_gateway) -> Stack:
    upstream, engine, batcher = engine_server
    return Stack(background, engine, batcher, upstream, open_gateway(upstream))


class Scripted:
    """An upstream that answers by a script: each answer is (status, body, headers), or a coroutine function."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.seen: list[dict] = []
        self.keys: list[str] = []
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/models", self._answer),
                Route("/health", self._answer),
            ]
        )

    async def _answer(self, request: Request) -> Response:
        if request.method == "POST":
            self.seen.append(await request.json())
        self.keys.append(request.headers["authorization"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return await answer(request)
        status, body, *headers = answer
        return JSONResponse(body, status, *headers)


def vllm_completion(tokens=(7, 9), head=((7, 3), (4, 5)), finish_reason="stop", k=2) -> dict:
    """A response in vLLM's form: the sampled token first among the candidates, the list cut after K + 1 entries."""

    def entry(id: int, logprob: float) -> dict:
        text = f"token_id:{id}"
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = []
    for token, ids in zip(tokens, head, strict=True):
        ranked = [entry(id, -0.5 - rank) for rank, id in enumerate([*ids, 100, 101][: k + 1])]
        own = next((e for e in ranked if e["token"] == f"token_id:{token}"), entry(token, -9.5))
        tops = [own, *(e for e in ranked if e is not own)][: k + 1]
        content.append({**own, "top_logprobs": tops})
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny", "prompt_logprobs": None,
        "prompt_token_ids": [11, 12, 13], "kv_transfer_params": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)},
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "text"}, "finish_reason": finish_reason,
            "logprobs": {"content": content}, "token_ids": list(tokens), "stop_reason": None,
        }],
    }  # fmt: skip


@pytest.fixture
def scripted(background):
    """`scripted(answer, …)` → (its URL, the upstream)."""

    def start(*answers) -> tuple[str, Scripted]:
        upstream = Scripted(*answers)
        return background.serve(upstream.app), upstream

    return start


@pytest.fixture
def completion():
    """`vllm_completion`."""
    return vllm_completion


@pytest.fixture
def same():
    """`equal_rollouts`."""
    return equal_rollouts


@pytest.fixture
def hash_engine() -> HashEngine:
    return HashEngine()


@pytest.fixture
def served_model() -> ServedModel:
    return MODEL


@pytest.fixture
def one(scripted, open_gateway, completion):
    """`one(answer, …, limits=…)` → (URL of a gateway, its scripted upstream)."""

    def start(*answers, **options):
        url, upstream = scripted(*(answers or [(200, completion())]))
        return open_gateway(url, policy=SCRIPTED, **options), upstream

    return start
