"""verl's rollout server over vLLM's CPU build: engine and worker in processes of their own, as verl starts them."""

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from score_centering.rollout import Sampling, validate_all
from score_centering.rollout.vllm import CPU_ENVIRONMENT, ENVIRONMENT
from score_centering.rollout.vllm_capture import EXTENSION
from score_centering.training.verl.messages import RECORD, request
from vllm_models import VOCABULARY, tiny_llama


@dataclass
class TokenOutput:
    token_ids: list[int]
    stop_reason: str
    extra_fields: dict[str, Any]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of that name, for this test."""
    made = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def server_class(monkeypatch):
    """`VllmServer` without verl and Ray, which vLLM's environment does not have: only their bases are stand-ins."""
    rollout = "verl.workers.rollout"
    stand_in(monkeypatch, "ray", remote=lambda kind: kind)
    for package in ("verl", "verl.workers", rollout, f"{rollout}.vllm_rollout"):
        stand_in(monkeypatch, package)
    stand_in(monkeypatch, f"{rollout}.replica", TokenOutput=TokenOutput)
    server = f"{rollout}.vllm_rollout.vllm_async_server"
    stand_in(monkeypatch, server, vLLMHttpServer=object, vLLMReplica=object)
    from score_centering.training.verl.server.vllm_server import VllmServer

    return VllmServer


async def answers(server: Any, arguments: dict[str, Any], requests: list[tuple[list[int], dict[str, Any]]]) -> list:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    server.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    await server.engine.collective_rpc("start_capture")
    calls = [server.generate(prompt, asked, f"request{i}") for i, (prompt, asked) in enumerate(requests)]
    try:
        return await asyncio.gather(*calls)
    finally:
        server.engine.shutdown()


def test_the_worker_records_once_verl_has_set_it_up(monkeypatch):
    base = type("Base", (), {"monkey_patch_model": lambda worker, vocab_size: worker.told.append(vocab_size)})
    loader, rollout = "vllm.model_executor.model_loader", "verl.workers.rollout.vllm_rollout"
    packages = ("vllm", "vllm.model_executor", loader, "verl", "verl.workers", "verl.workers.rollout", rollout)
    for package in packages:
        stand_in(monkeypatch, package)
    stand_in(monkeypatch, f"{loader}.reload", finalize_layerwise_reload=None, initialize_layerwise_reload=None)
    stand_in(monkeypatch, f"{rollout}.bucketed_weight_transfer", BucketedWeightReceiver=None)
    stand_in(monkeypatch, f"{rollout}.utils", vLLMColocateWorkerExtension=base)
    monkeypatch.delitem(sys.modules, "score_centering.training.verl.server.vllm_worker", raising=False)
    from score_centering.training.verl.server.vllm_worker import WorkerExtension

    one, two, three = torch.zeros(3).unbind()
    worker = WorkerExtension()
    worker.told, worker.model_runner = [], SimpleNamespace(kv_caches=[one, [two, three]])
    worker.execute_model = worker.sample_tokens = lambda output: output
    worker.monkey_patch_model(7)
    assert worker.told == [7] and all(isinstance(cache, torch.Tensor) for cache in worker.model_runner.kv_caches)
    assert worker.take_capture([]) == [] and worker.execute_model.__qualname__.startswith("CaptureExtension")
    del sys.modules["score_centering.training.verl.server.vllm_worker"]  # made of stand-ins


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_server_s_answer_is_a_capture_record(tmp_path, server_class, child_path, monkeypatch):
    for name, value in (ENVIRONMENT | CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(child_path))
    from vllm import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", "vllm.model_executor.models.llama:LlamaForCausalLM")
    torch.manual_seed(0)
    tiny_llama(dtype="bfloat16").to(torch.bfloat16).save_pretrained(tmp_path)
    server = server_class()
    server._engine_config = json.loads((tmp_path / "config.json").read_text())
    arguments = {
        "model": str(tmp_path), "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, "seed": 0,
        "max_model_len": 64, "max_num_seqs": 4, "max_logprobs": 8, "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False, "enable_chunked_prefill": False, "disable_log_stats": True,
        "worker_extension_cls": EXTENSION, "generation_config": "vllm", "distributed_executor_backend": "mp",
    }  # fmt: skip
    sampling = Sampling(1.0, 12, False, (2,))
    prompts = [[1, 26, 198], [504, 267], [90, 41, 7, 8]] * 3
    asked = [(prompt, request(sampling, seed, 8 * (seed % 2))) for seed, prompt in enumerate(prompts)]
    made = asyncio.run(answers(server, arguments, asked))
    rollouts = [output.extra_fields[RECORD] for output in made]
    assert [rollout.prompt_ids.tolist() for rollout in rollouts] == prompts
    assert [rollout.token_ids.tolist() for rollout in rollouts] == [output.token_ids for output in made]
    validate_all(rollouts[1::2], VOCABULARY)
    for i, rollout in enumerate(rollouts):
        assert len(rollout.token_ids) == len(rollout.logprobs) > 0 and np.isfinite(rollout.logprobs).all()
        assert (rollout.candidate_ids is None) == (i % 2 == 0)
        if i % 2:
            assert rollout.candidate_ids.shape == (len(rollout.token_ids), 8)
            inside = rollout.candidate_ids == rollout.token_ids[:, None]
            nearest = np.abs(rollout.candidate_logprobs - rollout.logprobs[:, None])
            assert nearest[inside].max(initial=0) <= 2**-11
