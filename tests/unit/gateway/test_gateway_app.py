"""The gateway between real clients and upstreams that answer by a script."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from starlette.responses import JSONResponse, Response

import score_centering.gateway.app as app
from gateway_calls import AUTHORISED, BODY, KEY, MESSAGES, client, collect, line, post, submit
from score_centering.gateway.capture import capture
from score_centering.gateway.client import make_tasks
from score_centering.gateway.store import Limits, turn_seed
from score_centering.rollout import validate, wire
from score_centering.rollout.candidates import round_logprobs


def test_sampling_is_the_configurations_whatever_the_agent_asks_for(one):
    url, upstream = one()
    with client(url, "train/r") as agent:
        agent.chat.completions.create(
            model="gpt-x", messages=MESSAGES, temperature=1.7, top_p=0.3, max_tokens=5, seed=11, user="me",
            extra_body={"top_k": 3, "top_logprobs": 20, "logprobs": True},
        )  # fmt: skip
    assert upstream.seen == [
        {
            "messages": MESSAGES, "model": "tiny", "temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0,
            "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "n": 1, "stream": False,
            "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3, "return_token_ids": True,
            "return_tokens_as_token_ids": True, "chat_template_kwargs": {"enable_thinking": True}, "seed": 11,
        }
    ]  # fmt: skip
    assert upstream.keys == [f"Bearer {KEY}"]


def test_validation_is_greedy_and_records_no_candidates(one):
    url, upstream = one()
    with client(url, "val/v") as agent:
        agent.chat.completions.create(model="x", messages=MESSAGES, max_tokens=100)
    sent = upstream.seen[0]
    assert (sent["temperature"], sent["top_logprobs"], sent["max_completion_tokens"]) == (0, 0, 8)
    ((rollout,),) = collect(url, "v", k=0)
    assert rollout.candidate_ids is None and rollout.token_ids.tolist() == [7, 9]


def test_the_agent_gets_an_ordinary_response(one):
    url, _ = one()
    body = post(url).json()
    assert body == {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "text"}, "finish_reason": "stop", "logprobs": None,
        }],
    }  # fmt: skip
    with client(url, "train/r2") as agent:
        answer = agent.chat.completions.create(model="x", messages=MESSAGES, logprobs=True)
    assert answer.choices[0].message.content == "text" and answer.choices[0].logprobs is None


def test_the_record_holds_each_candidate_once_and_the_sampled_token_apart(one):
    """At position 0 the sampled token leads the head, at 1 it is outside of it and vLLM cuts the list."""
    url, _ = one()
    post(url)
    ((rollout,),) = collect(url, "r")
    validate(rollout, 300)
    assert rollout.prompt_ids.tolist() == [11, 12, 13] and rollout.token_ids.tolist() == [7, 9]
    assert rollout.logprobs.tolist() == [-0.5, -9.5] and rollout.logprobs.dtype == np.float32
    assert rollout.candidate_ids.tolist() == [[7, 3], [4, 5]]
    assert np.array_equal(rollout.candidate_logprobs, round_logprobs(np.float32([[-0.5, -1.5]] * 2)))
    assert (rollout.prompt_index, rollout.sample_index, rollout.finish_reason) == (0, 0, "stop")


def test_a_candidate_that_is_listed_twice_is_kept_once(one, completion):
    answer = completion()
    tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    tops.insert(1, dict(tops[0]))
    url, _ = one((200, answer))
    post(url)
    ((rollout,),) = collect(url, "r")
    assert rollout.candidate_ids[0].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("finish_reason", "recorded"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")]
)
def test_finish_reasons(one, completion, finish_reason, recorded):
    url, _ = one((200, completion(finish_reason=finish_reason)))
    assert post(url).json()["choices"][0]["finish_reason"] == finish_reason
    assert collect(url, "r")[0][0].finish_reason == recorded


# ---------------------------------------------------------------------------------------------------- refused requests
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer a ke"}, {"authorization": "a key"}, {"x-api-key": KEY}],
)
@pytest.mark.parametrize("path", ["/train/r/v1/chat/completions", "/tasks", "/rollouts/collect", "/nowhere"])
def test_a_key_is_required(one, headers, path):
    url, upstream = one()
    response = httpx.post(url + path, json=BODY, headers=headers, trust_env=False)
    assert line(response) == (401, "a key is needed: Authorization: Bearer <SC_KEY>")
    assert response.headers["www-authenticate"] == "Bearer"
    assert upstream.seen == []


def test_openais_client_sees_a_wrong_key(one):
    url, _ = one()
    with (
        openai.OpenAI(base_url=f"{url}/train/r/v1", api_key="wrong") as agent,
        pytest.raises(openai.AuthenticationError),
    ):
        agent.chat.completions.create(model="x", messages=MESSAGES)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stream", True, "stream = True: a streamed response cannot be recorded whole"),
        ("n", 2, "n = 2: one response a request"),
        ("logit_bias", {"7": 5}, "logit_bias = {'7': 5}: the gateway samples from the model's own distribution"),
        ("presence_penalty", 0.5, "presence_penalty = 0.5: the gateway samples"),
        ("min_p", 0.1, "min_p = 0.1: the gateway samples"),
        ("stop", ["\n"], "stop = ['\\n']: the gateway samples"),
        ("response_format", {"type": "json_object"}, "response_format = {'type': 'json_object'}: the gateway samples"),
        ("tool_choice", "required", "tool_choice = 'required': the gateway samples"),
        ("guided_regex", "a+", "guided_regex = 'a+': the gateway samples"),
        ("max_tokens", 0, "max_tokens = 0: must be a whole number of at least 1"),
        ("max_completion_tokens", 1.5, "max_completion_tokens = 1.5: must be a whole number"),
        ("seed", 2**63, f"seed = {2**63}: must be a whole number of 64 bits"),
        ("messages", [], "messages: must be a list of at least one message"),
        ("messages", ["hello"], "messages: must be a list of at least one message"),
    ],
)
def test_what_changes_the_distribution_is_refused(one, field, value, message):
    url, upstream = one()
    status, text = line(post(url, BODY | {field: value}))
    assert status == 400 and text.startswith(message)
    assert upstream.seen == []


def test_neutral_values_and_tools_pass(one):
    url, upstream = one()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    neutral = {
        "stream": False, "n": 1, "presence_penalty": 0, "logit_bias": None, "stop": None, "tool_choice": "auto",
        "response_format": {"type": "text"}, "store": False, "tools": tools,
    }  # fmt: skip
    assert post(url, BODY | neutral).status_code == 200
    assert upstream.seen[0]["tools"] == tools and upstream.seen[0]["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "the request body is not valid JSON"), (b"[]", "the request body must be a JSON object")],
)
def test_a_body_that_is_no_object_is_refused(one, content, message):
    url, _ = one()
    response = httpx.post(f"{url}/train/r/v1/chat/completions", content=content, headers=AUTHORISED, trust_env=False)
    status, text = line(response)
    assert status == 400 and text.startswith(message)


def test_a_body_over_the_limit_is_refused(one):
    url, upstream = one(limits=Limits(body_bytes=1000))
    long = BODY | {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert line(post(url, long)) == (413, "the request body is over the limit of 1000 bytes")
    assert post(url).status_code == 200 and len(upstream.seen) == 1


def test_a_rollout_is_named_by_path_or_header(one):
    url, upstream = one()

    def by_header(**headers: str) -> httpx.Response:
        named = AUTHORISED | {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=named, trust_env=False)

    assert (
        by_header(x_rollout_id="r1").status_code
        == by_header(x_rollout_id="v1", x_rollout_mode="val").status_code
        == 200
    )
    assert [request["temperature"] for request in upstream.seen] == [0.5, 0]
    assert len(collect(url, "r1")) == len(collect(url, "v1", k=0)) == 1
    assert line(by_header()) == (400, "no rollout named: use the path /train/ROLLOUT/v1 or the header x-rollout-id")
    assert line(by_header(x_rollout_id="r", x_rollout_mode="test")) == (400, "mode 'test': choose train or val")
    assert line(post(url, rollout="test/r")) == (404, "mode 'test': choose train or val")
    assert line(by_header(x_rollout_id="x" * 129)) == (400, "the rollout's id must have 1 … 128 characters")


def test_a_rollout_stays_in_its_mode(one):
    url, _ = one()
    assert post(url, rollout="train/r").status_code == 200
    assert line(post(url, rollout="val/r")) == (409, "rollout 'r' has begun in mode train, not val")


# ------------------------------------------------------------------------------------------------------ bounded memory
def test_records_are_bounded_in_rollouts_turns_and_bytes(one, completion):
    size = 3 * len(wire.encode(capture(completion(), 2, 0, 0))) + 10
    url, upstream = one(limits=Limits(rollouts=2, turns=2, record_bytes=size))
    other = BODY | {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    third = BODY | {"messages": [{"role": "user", "content": "What is 3 + 2?"}]}
    assert post(url, rollout="train/a").status_code == post(url, other, rollout="train/a").status_code == 200
    assert line(post(url, third, rollout="train/a")) == (507, "rollout 'a' has reached the limit of 2 turns")
    assert post(url, rollout="train/b").status_code == 200
    assert line(post(url, rollout="train/c")) == (507, "the gateway holds its limit of 2 rollouts; collect some")
    assert len(upstream.seen) == 3
    status, text = line(post(url, other, rollout="train/b"))
    assert status == 507 and text == f"the records have reached the limit of {size} bytes; collect some"
    assert [len(turns) for turns in collect(url, "a", "b")] == [2, 1]
    assert post(url, rollout="train/c").status_code == 200, "collecting made room"


def test_requests_at_once_are_bounded(one, completion):
    arrived, release = threading.Event(), threading.Event()

    async def slowly(_request) -> Response:
        arrived.set()
        while not release.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse(completion())

    url, _ = one(slowly, limits=Limits(requests=1))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url)
        try:
            assert arrived.wait(30)
            refused = post(url, rollout="train/other")
        finally:
            release.set()
        assert line(refused) == (429, "the gateway serves its limit of 1 requests at once")
        assert refused.headers["retry-after"] == "1"
        assert first.result().status_code == 200
    assert post(url, rollout="train/other").status_code == 200, "the slot is free again"


def test_an_upstreams_response_over_the_limit_is_refused(one, monkeypatch):
    monkeypatch.setattr(app, "FIXED_BYTES", 100)
    monkeypatch.setattr(app, "ENTRY_BYTES", 1)
    url, _ = one()
    status, text = line(post(url))
    assert status == 502 and "its response is over the limit of 140 bytes" in text


# -------------------------------------------------------------------------------------------- faults of the upstream
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_passing_faults_are_asked_again(one, completion, status):
    url, upstream = one((status, {"error": {"message": "busy"}}), (200, completion()))
    assert post(url).status_code == 200
    assert len(upstream.seen) == 2 and len(collect(url, "r")[0]) == 1


def test_the_upstreams_own_pause_is_kept(one, completion):
    """The gateway's backoff would be 10 s; the upstream asks for none."""
    url, _ = one((429, {}, {"retry-after": "0"}), (200, completion()), backoff_seconds=8.0)
    assert post(url).status_code == 200


@pytest.mark.parametrize(("status", "seen_as"), [(503, 502), (429, 429), (500, 502), (409, 409)])
def test_attempts_are_bounded(one, status, seen_as):
    url, upstream = one((status, {"error": {"message": "no\nroom"}}), attempts=3)
    code, text = line(post(url))
    assert code == seen_as and text.endswith(f"status {status}: no room (3 attempts)")
    assert len(upstream.seen) == 3
    with pytest.raises(Exception, match="no such rollout"):
        collect(url, "r")  # a rollout without a record is forgotten


@pytest.mark.parametrize(
    ("status", "seen_as", "end"),
    [
        (400, 400, "status 400: too long"),
        (404, 404, "status 404: too long"),
        (401, 502, "status 401: too long (the upstream must take the gateway's SC_KEY)"),
    ],
)
def test_lasting_faults_are_not_asked_again(one, status, seen_as, end):
    url, upstream = one((status, {"error": {"message": "too long"}}))
    code, text = line(post(url))
    assert code == seen_as and text.endswith(end) and len(upstream.seen) == 1


def test_an_upstream_that_is_down(open_gateway):
    url = open_gateway("http://127.0.0.1:9", attempts=2)
    status, text = line(post(url))
    assert status == 502 and text.startswith("upstream http://127.0.0.1:9: ") and text.endswith("(2 attempts)")
    response = httpx.get(f"{url}/health", trust_env=False)
    assert line(response) == (503, "upstream http://127.0.0.1:9 is not healthy")


def test_an_upstream_that_does_not_answer_in_time(one):
    async def never(_request) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    url, upstream = one(never, timeout_seconds=0.2)
    status, text = line(post(url))
    assert status == 504 and text.endswith("no answer in 0.2 s (SC_UPSTREAM_TIMEOUT_SECONDS)")
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.pop("prompt_token_ids"), "KeyError: 'prompt_token_ids'"),
        (lambda r: r["choices"][0].pop("token_ids"), "KeyError: 'token_ids'"),
        (lambda r: r["choices"][0].__setitem__("logprobs", None), "TypeError"),
        (lambda r: r["choices"].append({}), "ValueError: too many values to unpack"),
        (lambda r: r["choices"][0].__setitem__("finish_reason", "abort"), "KeyError: 'abort'"),
        (lambda r: r["choices"][0]["token_ids"].__setitem__(1, 8), "2 token ids and log-probs of 2 other tokens"),
        (lambda r: r["choices"][0]["logprobs"]["content"].pop(), "2 token ids and log-probs of 1 other tokens"),
        (lambda r: r["choices"][0]["logprobs"]["content"][1]["top_logprobs"].__delitem__(slice(1, 3)),
         "1 candidates at position 1, 2 were asked for"),
        (lambda r: r["choices"][0]["logprobs"]["content"][0].__setitem__("token", "seven"), "not in the form token_id"),
        (lambda r: r["choices"][0]["logprobs"]["content"][0].__setitem__("logprob", "low"), "ValueError"),
    ],
)  # fmt: skip
def test_a_response_that_is_no_record_is_refused(one, completion, damage, message):
    answer = completion()
    damage(answer)
    url, _ = one((200, answer))
    status, text = line(post(url))
    assert status == 502 and message in text and "\n" not in text


# ------------------------------------------------------------------------------------------------------------- clients
def test_a_client_that_goes_away_frees_its_slot_and_ends_the_upstreams_request(one, completion):
    arrived, gone = threading.Event(), threading.Event()

    async def until_gone(request) -> Response:
        arrived.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return Response()

    url, _ = one(until_gone, (200, completion()), limits=Limits(requests=1))

    async def give_up() -> None:
        async with httpx.AsyncClient(trust_env=False) as hasty:
            asked = asyncio.create_task(
                hasty.post(f"{url}/train/r/v1/chat/completions", json=BODY, headers=AUTHORISED, timeout=None)
            )
            assert await asyncio.to_thread(arrived.wait, 30)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(give_up())
    assert gone.wait(10)
    assert post(url).status_code == 200
    assert len(collect(url, "r")[0]) == 1


def test_a_conversation_asked_again_is_the_same_turn(one):
    """A client that lost an answer asks again: the same seed, one record. Another conversation is another turn."""
    url, upstream = one()
    (task,) = make_tasks(["What is 1 + 2?"], 1, "train", 5, "t")
    submit(url, task)
    longer = BODY | {
        "messages": [*MESSAGES, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    }
    for body in (BODY, BODY, longer, BODY):
        assert post(url, body, rollout=f"train/{task.id}").status_code == 200
    seeds = [request["seed"] for request in upstream.seen]
    assert seeds == [task.seed, task.seed, turn_seed(task.seed, 1), task.seed]
    assert len(set(seeds)) == 2 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    httpx.post(f"{url}/tasks/{task.id}/done", json={"error": None}, headers=AUTHORISED, trust_env=False)
    (turns,) = collect(url, task.id)
    assert [(turn.prompt_index, turn.sample_index) for turn in turns] == [(0, 0), (0, 0)]


def test_models_and_health_are_the_upstreams(one):
    url, upstream = one((200, {"object": "list", "data": [{"id": "tiny"}]}))
    with client(url, "train/r") as agent:
        assert [model.id for model in agent.models.list()] == ["tiny"]
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
    assert upstream.seen == []
