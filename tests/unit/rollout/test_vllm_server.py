"""The gateway in front of vLLM's own server (CPU build), in the environment of `make test-vllm`."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from score_centering.gateway.app import gateway_app
from score_centering.gateway.client import GatewayClient, make_tasks
from score_centering.gateway.policy import Policy
from score_centering.gateway.running import Background
from score_centering.gateway.upstream import Upstream
from score_centering.rollout import validate_all
from vllm_models import VOCABULARY, tiny_llama

KEY, K = "a-key", 16
POLICY = Policy(
    model="tiny", temperature=0.7, top_p=1, top_k=-1, max_tokens=12, top_logprobs=K, enable_thinking=True
)  # fmt: skip
PROBLEMS = ["What is 1 + 2?", "What is 3 + 4?", "7 - 2 ="]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build is not installed"),
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A tiny Llama with peaked distributions, its tokenizer and chat template."""
    import torch

    from score_centering.model.scratch import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(PROBLEMS * 4, VOCABULARY)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = tiny_llama(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.to(torch.bfloat16).save_pretrained(folder)
    # A filter that the gateway must override: vLLM takes a model's own sampling defaults.
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 2, "temperature": 0.1}))
    return folder


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory, child_path):
    """The URL of vLLM's server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    options = {
        "model": model_folder, "served-model-name": "tiny", "host": "127.0.0.1", "port": port, "api-key": KEY,
        "dtype": "bfloat16", "max-model-len": 128, "max-num-seqs": 8, "max-logprobs": K + 1,
        "logprobs-mode": "processed_logprobs",
    }  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(child_path), os.environ.get("PYTHONPATH")])),
        "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 540
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def reference(folder: Path, rollout) -> np.ndarray:
    """Log-probs (R, V) at the policy's temperature, by transformers' BF16 forward."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.token_ids])[None], dtype=torch.int64)
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
    return (logits / POLICY.temperature).log_softmax(-1).numpy()


@pytest.mark.timeout(900)
def test_completions_of_vllms_server_become_capture_records(server, model_folder):
    tasks = make_tasks(PROBLEMS, 4, "train", 3, "t")

    async def run(url: str):
        async with GatewayClient(url, KEY) as gateway:
            await gateway.submit(tasks)
            for task in tasks:
                with openai.OpenAI(base_url=f"{url}/train/{task.id}/v1", api_key=KEY, max_retries=0) as agent:
                    messages = [{"role": "user", "content": task.problem}]
                    answer = agent.chat.completions.create(model="x", messages=messages, temperature=0.1, top_p=0.2)
                assert answer.choices[0].logprobs is None and answer.choices[0].message.content is not None
                await gateway._post(f"/tasks/{task.id}/done", {}, 204)
            return await gateway.collect([task.id for task in tasks], VOCABULARY, K)

    async def connect() -> Upstream:
        return Upstream(server, KEY, 300)

    with Background() as background:
        upstream = background.submit(connect()).result()
        collected = asyncio.run(run(background.serve(gateway_app(POLICY, upstream, KEY))))
    rollouts = [turn for turns in collected for turn in turns]
    assert len(rollouts) == len(tasks)
    validate_all(rollouts, VOCABULARY, K)
    ranks, gaps = [], []
    for rollout in rollouts:
        logprobs = reference(model_folder, rollout)
        rows = np.arange(len(rollout.token_ids))
        gaps.append(np.abs(logprobs[rows, rollout.token_ids] - rollout.logprobs))
        gaps.append(np.abs(np.take_along_axis(logprobs, rollout.candidate_ids, 1) - rollout.candidate_logprobs).ravel())
        ranks.append((logprobs > logprobs[rows, rollout.token_ids][:, None]).sum(1))
    assert np.concatenate(gaps).mean() < 0.05, "log-probs are those of T = 0.7 over the whole vocabulary"
    assert np.concatenate(ranks).max() >= 2, "the model's own top-k of 2 was overridden"
    outside = [(r.candidate_ids != r.token_ids[:, None]).all(1) for r in rollouts]
    print(f"sampled outside the head: {np.concatenate(outside).mean():.2f}")
