"""Requests to a gateway over a scripted upstream, as its tests make them."""

import asyncio

import httpx
import openai

from score_centering.gateway.client import GatewayClient
from score_centering.gateway.policy import Policy
from score_centering.gateway.store import AgentTask

KEY = "a key"
POLICY = Policy(
    model="tiny", temperature=0.5, top_p=1, top_k=-1, max_tokens=8, top_logprobs=2, enable_thinking=True
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
BODY = {"model": "any", "messages": MESSAGES}
AUTHORISED = {"authorization": f"Bearer {KEY}"}


def post(url: str, body: dict = BODY, headers: dict = AUTHORISED, rollout: str = "train/r") -> httpx.Response:
    return httpx.post(f"{url}/{rollout}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


def line(response: httpx.Response) -> tuple[int, str]:
    """Status and message of a refusal."""
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return response.status_code, error["message"]


def client(url: str, rollout: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/{rollout}/v1", api_key=KEY, max_retries=0, **options)


def collect(url: str, *ids: str, k: int = 2, vocabulary: int = 300) -> list:
    async def ask():
        async with GatewayClient(url, KEY) as gateway:
            return await gateway.collect(ids, vocabulary, k)

    return asyncio.run(ask())


def submit(url: str, *tasks: AgentTask) -> None:
    async def ask():
        async with GatewayClient(url, KEY) as gateway:
            await gateway.submit(tasks)

    asyncio.run(ask())


def call(url: str, path: str, body: dict) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=AUTHORISED, timeout=30, trust_env=False)
