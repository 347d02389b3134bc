"""How rollouts reach a trainer: straight from its engine, or through agents, gateway and a server over the engine.

Through the gateway everything is real HTTP on the loopback address: the trainer queues one task a rollout, an agent
asks for a chat completion, the gateway forwards it to the server over the engine and keeps the capture record, which
comes back in wire form. The engine computes in the trainer's own thread, and a rollout's tokens depend on nothing but
weights, prompt and stream, so both ways give the same rollouts to the last bit.
"""

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from starlette.applications import Starlette

from score_centering.gateway import environment
from score_centering.gateway.agent import work
from score_centering.gateway.app import gateway_app
from score_centering.gateway.client import GatewayClient, make_tasks
from score_centering.gateway.policy import Policy
from score_centering.gateway.running import Background
from score_centering.gateway.serving import ServedModel, serving_app
from score_centering.gateway.upstream import Upstream
from score_centering.model.chat import encode_messages, response_text
from score_centering.rollout import Rollout, Sampling, StreamEngine
from score_centering.rollout.batching import Batcher
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.task import Prompt, Task


@dataclass(frozen=True)
class ExternalGateway:
    """A gateway and agents in processes of their own, such as `launch.py` starts.

    url: of the gateway.  engine_port: where that gateway expects the engine's server of this process.
    """

    url: str
    engine_port: int


class Generate(Protocol):
    """How the run loop asks for rollouts: `rollout.Engine.generate` for prompts that bring their problem along."""

    def __call__(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, top_logprobs: int
    ) -> list[Rollout]: ...


def direct(engine: StreamEngine) -> Generate:
    """Ask the engine itself."""

    def generate(prompts, n, sampling, seed, top_logprobs) -> list[Rollout]:
        return engine.generate([prompt.ids for prompt in prompts], n, sampling, seed, top_logprobs)

    return generate


@contextmanager
def open_transport(
    stage: TrainStage, engine: StreamEngine, task: Task, gateway: ExternalGateway | None = None
) -> Iterator[Generate]:
    """The way that `actor_rollout_ref.rollout.transport` names, open for the block.

    gateway: used instead of one in this process, with `SC_KEY`.

    Raises:
        UserError: a gateway is given for the direct way, or its engine's port is in use.
    """
    if stage.actor_rollout_ref.rollout.transport == "direct":
        if gateway is not None:
            raise UserError("--gateway: needs actor_rollout_ref.rollout.transport=gateway")
        yield direct(engine)
        return
    batcher = Batcher(engine)
    with Background() as background:
        model = _served_model(stage, task)
        if gateway is None:
            key = secrets.token_hex(16)
            upstream = background.serve(serving_app(model, batcher, key))
            url = background.serve(_gateway_app(stage, model.name, upstream, key))
            agents: Future[None] | None = background.start_client(work(url, key, stage.prompt.instruction))
        else:
            key, url, agents = environment.key(), gateway.url, None
            background.serve(serving_app(model, batcher, key), gateway.engine_port)
        yield GatewayTransport(background, batcher, agents, url, key, task.vocab_size)


class GatewayTransport:
    """Generates through a gateway whose upstream is this process's engine. Call it from the engine's thread."""

    def __init__(
        self,
        background: Background,
        batcher: Batcher,
        agents: "Future[None] | None",
        url: str,
        key: str,
        vocab_size: int,
    ) -> None:
        self._background = background
        self._batcher = batcher
        self._agents = agents
        self._url, self._key = url, key
        self._vocab_size = vocab_size
        self._name, self._calls = secrets.token_hex(4), 0

    def __call__(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, top_logprobs: int
    ) -> list[Rollout]:
        self._calls += 1
        mode, problems = "val" if sampling.greedy else "train", [prompt.problem for prompt in prompts]
        tasks = make_tasks(problems, n, mode, seed, f"{self._name}-{self._calls}")

        async def ask() -> list[Rollout]:
            async with GatewayClient(self._url, self._key) as client:
                return await client.rollouts(tasks, self._vocab_size, top_logprobs)

        asked = self._background.submit(ask())
        if self._agents is not None:  # agents of this process that end leave nobody to wait for
            self._agents.add_done_callback(lambda _: asked.cancel())
        self._batcher.serve_until(asked)
        if self._agents is not None and self._agents.done():
            self._agents.result()
        rollouts = asked.result()
        for rollout in rollouts:
            if rollout.prompt_ids.tolist() != list(prompts[rollout.prompt_index].ids):
                raise UserError(
                    f"gateway {self._url}: the agent's prompt of rollout (prompt {rollout.prompt_index}, sample "
                    f"{rollout.sample_index}) is not the trainer's; agents and trainer need the same configuration"
                )
        return rollouts


def _served_model(stage: TrainStage, task: Task) -> ServedModel:
    tokenizer = task.tokenizer
    return ServedModel(
        name=stage.experiment,
        encode=lambda messages, thinking: encode_messages(tokenizer, messages, thinking),
        decode=lambda ids: response_text(tokenizer, ids),
        stop_token_ids=task.stop_token_ids,
        vocab_size=task.vocab_size,
        max_prompt_length=stage.data.max_prompt_length,
        max_response_length=stage.data.max_response_length,
    )


def _gateway_app(stage: TrainStage, model: str, upstream: str, key: str) -> Starlette:
    client = Upstream(upstream, key, environment.upstream_timeout_seconds())
    return gateway_app(Policy.of(stage, model), client, key)
