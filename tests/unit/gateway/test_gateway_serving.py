"""The server over an engine: what it answers, how it batches, and that nothing gets mixed up under load."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack

import httpx
import httpx2
import numpy as np
import openai
import pytest

from score_centering.gateway.client import GatewayClient
from score_centering.gateway.serving import serving_app
from score_centering.rollout import Sampling
from score_centering.rollout.batching import Batcher, Full, Request
from score_centering.settings import UserError

KEY = "a key"
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
BODY = {"model": "tiny", "messages": MESSAGES}
TRAIN = Sampling(0.5, 8, False, (299,))
GREEDY = Sampling(1.0, 8, True, (299,))


def post(url: str, body: dict) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


def test_openais_client_gets_completions(stack):
    with openai.OpenAI(base_url=f"{stack.upstream}/v1", api_key=KEY, max_retries=0) as client:
        first, again, other = (
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0.5, seed=seed, max_tokens=8)
            for seed in (3, 3, -4)
        )
        assert [model.id for model in client.models.list()] == ["tiny"]
    assert first.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.choices[0].logprobs is None and first.id != again.id


def test_ids_and_logprobs_survive_json_to_the_last_bit(stack, hash_engine):
    answer = post(
        stack.upstream,
        BODY | {"seed": 5, "temperature": 0.5, "max_tokens": 8, "logprobs": True, "top_logprobs": 5,
                "return_token_ids": True, "return_tokens_as_token_ids": True},
    ).json()  # fmt: skip
    expected = hash_engine.rollout(answer["prompt_token_ids"], 5, TRAIN, 5)
    choice = answer["choices"][0]
    assert choice["token_ids"] == expected.token_ids.tolist() and choice["finish_reason"] == expected.finish_reason
    content = choice["logprobs"]["content"]
    assert np.array_equal(np.float32([entry["logprob"] for entry in content]), expected.logprobs)
    tops = [[(int(top["token"][9:]), top["logprob"]) for top in entry["top_logprobs"]] for entry in content]
    assert np.array_equal(np.array(tops)[..., 0], expected.candidate_ids)
    assert np.array_equal(np.float32(np.array(tops)[..., 1]), expected.candidate_logprobs)


def test_text_parts_and_thinking_reach_the_template(stack):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
    asked = BODY | {"return_token_ids": True}
    plain = post(stack.upstream, asked).json()["prompt_token_ids"]
    in_parts = post(stack.upstream, asked | {"messages": [{"role": "user", "content": parts}]}).json()
    assert in_parts["prompt_token_ids"] == plain
    silent = post(stack.upstream, asked | {"chat_template_kwargs": {"enable_thinking": False}}).json()
    assert silent["prompt_token_ids"] == [0, *plain[1:]]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "model 'other': this server has 'tiny'"),
        ({"top_p": 0.9}, 400, "top_p = 0.9: this server takes 1 only"),
        ({"top_k": 20}, 400, "top_k = 20: this server takes -1 only"),
        ({"stream": True}, 400, "stream = True: this server takes False only"),
        ({"tools": [{}]}, 400, "tools = [{}]: this server takes [] only"),
        ({"temperature": -1}, 400, "temperature = -1: allowed are 0 … 1000"),
        ({"temperature": "hot"}, 400, "temperature = 'hot': allowed are 0 … 1000"),
        ({"max_tokens": 13}, 400, "max_completion_tokens = 13: allowed are 1 … 12"),
        ({"top_logprobs": -2}, 400, "top_logprobs = -2: allowed are 0"),
        ({"seed": 2**63}, 400, f"seed = {2**63}: must be a whole number of 64 bits"),
        ({"messages": []}, 400, "messages: must be a list of at least one message"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0]: must hold a role and a content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]: its content must be"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, 400, "the prompt has 501 tokens, allowed are 1 … 400"),
    ],
)
def test_requests_that_are_refused(stack, change, status, message):
    response = post(stack.upstream, BODY | change)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)
    assert stack.engine.batches == []


def test_k_is_bounded_by_the_vocabulary(stack):
    answer = post(stack.upstream, BODY | {"logprobs": True, "top_logprobs": 5000}).json()
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 300


def test_the_engines_own_fault_is_told(background, served_model):
    class Broken:
        def generate_streams(self, *_):
            raise UserError("local engine: a log-prob is not finite")

    batcher, done, raised = Batcher(Broken()), Future(), []
    url = background.serve(serving_app(served_model, batcher, KEY))

    def serve():
        try:
            batcher.serve_until(done)
        except UserError as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    response = post(url, BODY)
    thread.join(30)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == str(raised[0]) == "local engine: a log-prob is not finite"


# ----------------------------------------------------------------------------------------------------------- batching
def request(prompt: int, stream: int = 0, sampling: Sampling = TRAIN, k: int = 0) -> Request:
    return Request((1, prompt), sampling, stream, k)


def serve(batcher: Batcher, requests: list[Request]) -> None:
    """Serve on this thread until every request has its result."""
    done: Future[None] = Future()

    def wait():
        for waiting in requests:
            if not waiting.result.cancelled():
                waiting.result.result(30)
        done.set_result(None)

    thread = threading.Thread(target=wait)
    thread.start()
    batcher.serve_until(done)
    thread.join()


def test_requests_of_one_kind_share_a_batch_and_get_their_own_answer(hash_engine, same):
    batcher = Batcher(hash_engine)
    mixed = [request(i % 3, i, GREEDY if i % 4 == 0 else TRAIN, k=5 * (i % 2)) for i in range(20)]
    for one in mixed:
        batcher.submit(one)
    serve(batcher, mixed)
    assert sorted(hash_engine.batches) == [5, 5, 10], "greedy; sampled; sampled with candidates"
    for one in mixed:
        expected = hash_engine.rollout(one.prompt, one.stream, one.sampling, one.top_logprobs)
        assert same(one.result.result(), expected)


def test_a_cancelled_request_is_not_computed(hash_engine):
    batcher = Batcher(hash_engine)
    kept, dropped = request(1), request(2)
    for one in (dropped, kept):
        batcher.submit(one)
    dropped.result.cancel()
    serve(batcher, [kept])
    assert hash_engine.batches == [1]


def test_a_full_queue_refuses(hash_engine):
    batcher = Batcher(hash_engine, max_waiting=1)
    batcher.submit(request(1))
    with pytest.raises(Full):
        batcher.submit(request(2))


# --------------------------------------------------------------------------------------------------------------- load
def test_a_thousand_requests_at_once_none_lost_none_mixed_up(stack, same):
    """All 1,000 are open at the same time: the engine computes nothing before the last one has arrived at it."""
    arrived, engine, count = stack.batcher.submitted, stack.engine, 1000
    engine.blocked = threading.Event()

    def release() -> None:
        deadline = time.monotonic() + 400
        while arrived() < count and time.monotonic() < deadline:
            time.sleep(0.02)
        engine.blocked.set()

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        session = client.with_options(base_url=f"{stack.url}/train/load-{number}/v1")
        messages = [{"role": "user", "content": f"What is {number // 4} + 1?"}]
        answer = await session.chat.completions.create(model="x", messages=messages, seed=number)
        return answer.choices[0].message.content

    async def run():
        async with AsyncExitStack() as open_clients, GatewayClient(stack.url, KEY) as gateway:
            clients = [await open_clients.enter_async_context(patient_client(stack.url)) for _ in range(20)]
            asked = [asyncio.create_task(ask(clients[number % 20], number)) for number in range(count)]
            await asyncio.to_thread(release)
            texts = await asyncio.gather(*asked)
            return texts, await gateway.collect([f"load-{number}" for number in range(count)], 300, 5)

    texts, records = asyncio.run(run())
    assert arrived() == sum(engine.batches) == count and len(engine.batches) < 10
    for number, (text, turns) in enumerate(zip(texts, records, strict=True)):
        expected = engine.rollout([1, *f"What is {number // 4} + 1?".encode()], number, TRAIN, 5)
        assert text == " ".join(map(str, expected.token_ids))
        assert len(turns) == 1 and same(turns[0], expected)


def patient_client(url: str) -> openai.AsyncOpenAI:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    transport = openai.DefaultAsyncHttpxClient(limits=limits, timeout=500, trust_env=False)
    return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=transport)
