"""A Qwen3.5 small enough for exact references, and rollouts for it, shared by the tests of the update."""

import numpy as np
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.rollout import Rollout
from score_centering.rollout.candidates import round_logprobs

VOCABULARY, CANDIDATES = 40, 6
CONFIG = Qwen3_5TextConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    tie_word_embeddings=True,
)


def tiny_model(dtype: torch.dtype = torch.float32) -> Qwen3_5ForCausalLM:
    """The same weights at every call, three times as wide as at a start, so that the tokens' probabilities differ."""
    torch.manual_seed(3)
    net = Qwen3_5ForCausalLM(CONFIG).to(dtype)
    for parameter in net.parameters():
        parameter.data.mul_(3)
    install_cpu_kernels(net)
    return net


def tiny_rollouts(count: int = 6, seed: int = 0) -> list[Rollout]:
    """Two a prompt, of 1 to 8 tokens drawn from random distributions, with the most probable ones as candidates."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(rng.integers(1, 9))
        logits = rng.normal(size=(length, VOCABULARY)) * 2
        logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        tokens = np.array([rng.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum()) for row in logprobs], np.int32)
        head = np.argsort(-logprobs, axis=1)[:, :CANDIDATES].astype(np.int32)
        made.append(
            Rollout(
                prompt_index=index // 2,
                sample_index=index % 2,
                prompt_ids=rng.integers(0, VOCABULARY, size=int(rng.integers(2, 6))).astype(np.int32),
                token_ids=tokens,
                logprobs=np.take_along_axis(logprobs, tokens[:, None].astype(int), 1)[:, 0],
                candidate_ids=head,
                candidate_logprobs=round_logprobs(np.take_along_axis(logprobs, head.astype(int), 1)),
                finish_reason="stop",
            )
        )
    return made
