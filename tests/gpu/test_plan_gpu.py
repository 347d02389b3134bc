"""The plan against the measured peak of an update on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from score_centering.planning.plan import Planner
from score_centering.settings import load_settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]
SHAPE = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "full_attention"] * 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
CASE = {
    "shape": SHAPE, "micro_batch": 16, "ignore": ["lm_head", "re:.*in_proj_[ab]$"], "max_num_seqs": 64, "prompt": 64,
    "response": 192, "prompts": 16, "n": 4,
}  # fmt: skip


def test_the_plan_is_within_15_percent_of_a_measured_peak():
    program = ROOT / "tests/unit/planning/measure_local_memory.py"
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(CASE), "cuda"], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)["peak_bytes"]
    settings = load_settings(
        [ROOT / "config/config.yaml"],
        [
            "runtime.device=cuda",
            f"data.train_batch_size={CASE['prompts']}",
            f"data.max_prompt_length={CASE['prompt']}",
            f"data.max_response_length={CASE['response']}",
            f"actor_rollout_ref.rollout.n={CASE['n']}",
            f"actor_rollout_ref.rollout.max_num_seqs={CASE['max_num_seqs']}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={CASE['micro_batch']}",
        ],
    )
    planner = Planner(Qwen3_5TextConfig(**SHAPE), "h200")
    planner.process = 0  # torch counts what it allocated, not the context
    peak = planner.memory(settings).peak
    print(f"planned {peak.total:,} ({peak.name}), measured {measured:,}: {dict(peak.held)}")
    assert peak.total == pytest.approx(measured, rel=0.15)
