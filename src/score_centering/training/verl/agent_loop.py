"""The single-turn math task as verl's agent loop: one request a rollout, whose answer is a capture record."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)
from verl.utils.profiler import simple_timer

from score_centering.training.verl.driver.verl_config import AGENT_LOOP
from score_centering.training.verl.messages import RECORD


@register(AGENT_LOOP)
class SingleTurn(AgentLoopBase):
    """Sends a prompt's ids to a rollout server and keeps the record of what was sampled."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput:
        """fields: prompt_ids, prompt_index, sample_index and request (`messages.request`); verl's own sampling_params
        have neither seed nor K and are not used."""
        prompt_ids, seconds = list(fields["prompt_ids"]), {}
        with simple_timer("generate_sequences", seconds):
            output = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt_ids, sampling_params=dict(fields["request"])
            )
        index = {name: int(fields[name]) for name in ("prompt_index", "sample_index")}
        record = replace(output.extra_fields[RECORD], **index)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            metrics=AgentLoopMetrics(**seconds),
            extra_fields={RECORD: record},
        )


class Manager(AgentLoopManager):
    """Agent loops without verl's reward workers: they score in threads, where math_verify can't; the driver scores."""

    def __init__(self, config: DictConfig, llm_client: Any, **_: Any) -> None:
        super().__init__(config, llm_client)
