"""The gateway's program: what it serves by which settings, and what it refuses before it serves."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from score_centering.gateway.policy import Policy
from score_centering.settings import load_settings
from score_centering.settings.stages import GatewayStage

ROOT = Path(__file__).parents[3]
PROGRAM = "workflow/scripts/gateway.py"
UPSTREAM = ("--upstream", "http://127.0.0.1:9")


def policy(preset: str, *overrides: str, arm: str | None = None) -> Policy:
    settings = load_settings([ROOT / "config/config.yaml", ROOT / f"config/{preset}.yaml"], overrides, arm)
    stage = GatewayStage.of(settings)
    return Policy.of(stage, stage.model_name)


def test_the_policy_is_the_training_configurations():
    made = policy("b200", "actor_rollout_ref.rollout.temperature=0.8", arm="sc_tis")
    assert made == Policy(
        model="Qwen/Qwen3.5-9B", temperature=0.8, top_p=1, top_k=-1, max_tokens=8192, top_logprobs=128,
        enable_thinking=True,
    )  # fmt: skip
    assert policy("test", arm="grpo").top_logprobs == 0
    assert policy("test").model == "test"


def test_the_published_prefix_names_the_candidates():
    overrides = ["default_proxy.score_centering.enabled=true", "default_proxy.score_centering.top_logprobs_num=7"]
    assert policy("test", *overrides).top_logprobs == 7


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (UPSTREAM, {"SC_PORT": "0"}, "SC_PORT = '0': must be a port, 1 … 65535"),
        (UPSTREAM, {"SC_KEY": "two words"}, "SC_KEY: must be one word of printable ASCII characters"),
        (
            UPSTREAM,
            {"SC_UPSTREAM_TIMEOUT_SECONDS": "soon"},
            "SC_UPSTREAM_TIMEOUT_SECONDS = 'soon': must be a number of seconds above 0",
        ),
        (("--upstream", "localhost"), {}, "--upstream localhost: must be a URL such as http://127.0.0.1:8000"),
        ((*UPSTREAM, "--max-requests", "0"), {}, "--max-requests 0: must be at least 1"),
        ((*UPSTREAM, "--baseline", "sp"), {}, "unknown arm 'sp' (defined: "),
    ],
)
def test_what_is_refused_before_anything_is_served(arguments, environment, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [PROGRAM, *arguments])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(PROGRAM, run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


def test_the_program_serves_at_its_port_with_its_key_until_it_is_stopped(scripted, completion):
    upstream, seen = scripted((200, completion()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = subprocess.run(
            [sys.executable, PROGRAM, "--upstream", upstream],
            cwd=ROOT, env={**os.environ, "SC_PORT": str(port)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (refused.returncode, refused.stderr) == (
        2, f"error: cannot listen on 127.0.0.1:{port}: address already in use\n",
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "--upstream", upstream, "--baseline", "sc", "--model", "served",
         "default_proxy.score_centering.top_logprobs_num=2"],
        cwd=ROOT, env={**os.environ, "SC_PORT": str(port), "SC_KEY": "the-key"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == f"gateway: http://127.0.0.1:{port} in front of {upstream}\n"
        url, body = f"http://127.0.0.1:{port}", {"messages": [{"role": "user", "content": "1 + 1 ="}]}
        while not answers(url):
            assert process.poll() is None
            time.sleep(0.05)
        asked = {
            key: httpx.post(
                f"{url}/train/r/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"},
                trust_env=False,
            ).status_code
            for key in ("the-key", "another")
        }  # fmt: skip
        assert asked == {"the-key": 200, "another": 401}
        assert (seen.seen[0]["model"], seen.seen[0]["top_logprobs"]) == ("served", 3)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", trust_env=False)
    except httpx.ConnectError:
        return False
    return True
