"""Prints the peak memory of one update as the local trainer makes it, in bytes, for test_plan.py and the GPU's.

Arguments: sizes as JSON (test_plan.py's CASE), and the device.
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from score_centering.objectives import build_objective
from score_centering.precision import listed_linears, requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Sampling
from score_centering.runs import peak_rss_bytes
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.masters import MasterWeights
from score_centering.training.update import Updater


def main(case: dict, device: str) -> None:
    before = peak_rss_bytes()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**case["shape"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    if device == "cpu":
        install_cpu_kernels(model)
    masters = MasterWeights(model, Optim(name="adamw", lr=1e-4))
    arm = {"policy_loss": "ppo", "centering": False, "is_mode": "none", "loss_agg_mode": "seq-mean-token-mean"}
    limits = {"tis_max": 2.0, "mis_min": 0.5, "mis_max": 5.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    actor = Actor(optim=Optim(lr=1e-4), ppo_micro_batch_size_per_gpu=case["micro_batch"])
    updater = Updater(model, masters, build_objective("grpo", **arm, **limits), actor, 1.0, "stop")
    scheme = {"quantization_config": INT8.quantization_config(["Linear"], case["ignore"])}
    engine = LocalEngine(
        model.config,
        quantised_config=scheme,
        kv_cache="int4_per_token_head",
        max_batch=case["max_num_seqs"],
        max_prompt_length=case["prompt"],
        max_response_length=case["response"],
        device=device,
    )
    listed = listed_linears(scheme, model)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (case["prompts"], case["prompt"]))
    sampling = Sampling(1.0, case["response"], False, ())
    for step in (1, 2):  # the optimiser has no state before the first update
        engine.sync(requantise({name: value.detach() for name, value in model.state_dict().items()}, listed), step)
        if step == 1:
            rollouts = engine.generate(prompts.tolist(), case["n"], sampling, step, 0)
        updater.update(rollouts, torch.randn(len(rollouts)), step)
    peak = peak_rss_bytes() - before if device == "cpu" else torch.cuda.max_memory_allocated()
    print(json.dumps({"peak_bytes": peak, "process_bytes": before}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
