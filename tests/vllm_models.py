"""What the tests and benchmarks of vLLM share: a W8A8 scheme, a tiny model, and vLLM's own answer to our requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from score_centering.rollout import Sampling
from score_centering.rollout.vllm import VllmEngine, sampling_parameters

VOCABULARY = 512
_KIND = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _KIND | {"strategy": "channel", "dynamic": False},
            "input_activations": _KIND | {"strategy": "token", "dynamic": True},
        }
    },
}


def tiny_llama(**more: Any) -> LlamaForCausalLM:
    """Random weights, by torch's seed. more: keys of its configuration."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, **more,
        )
    )  # fmt: skip


def flat_answers(
    engine: VllmEngine, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: Sampling, top: int | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """vLLM's own answer, not recorded: ids (R, K + 1) int32 and log-probs (R, K + 1) float32 of each prompt, from its
    flat lists; nothing where `top` is None, which asks for no log-probs."""
    parameters = [sampling_parameters(sampling, seed, top or 0, "") for seed in seeds]
    for each in parameters:
        each.extra_args, each.logprobs, each.flat_logprobs = None, top, True
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    if top is None:
        return []
    lists = [output.outputs[0].logprobs for output in outputs]
    return [
        (np.array(f.token_ids, np.int32).reshape(-1, top + 1), np.array(f.logprobs, np.float32).reshape(-1, top + 1))
        for f in lists
    ]
