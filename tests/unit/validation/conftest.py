"""A tiny hybrid model with its W8A8 weights, and an engine that is transformers' own forward."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.precision import requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.format import Format
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.registry import Precision
from score_centering.rollout import Rollout, candidates
from score_centering.validation.measure import Quantised, emulation


@dataclass(frozen=True)
class Tiny:
    model: nn.Module
    base: dict[str, Tensor]
    w8a8: dict[str, Tensor]
    listed: dict[str, Format]


@pytest.fixture(scope="session")
def tiny_qwen() -> Tiny:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)  # peaked next-token distributions, as a trained model has
    model = model.to(torch.bfloat16).eval()
    install_cpu_kernels(model)
    listed = {
        name: INT8
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "in_proj_a", "in_proj_b"))
    }
    base = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return Tiny(model, base, requantise(base, listed), listed)


class EmulatedEngine:
    """One token at a time, a whole forward each, under the validation's emulation."""

    def __init__(self, model: nn.Module, listed: Mapping[str, Format], precision: Precision) -> None:
        self.model, self.listed, self.precision = model, listed, precision
        self.closed = False

    def sync(self, weights: Mapping[str, Tensor], step: int) -> None:
        quantised = self.precision.quantization is not None
        self.checkpoint = Quantised(weights, self.listed if quantised else {})

    def generate(self, prompts, n, sampling, seed, top_logprobs) -> list[Rollout]:
        with torch.no_grad(), emulation(self.model, self.checkpoint, self.precision):
            return [
                self._one(i, j, list(prompt), sampling, seed, top_logprobs)
                for i, prompt in enumerate(prompts)
                for j in range(n)
            ]

    def close(self) -> None:
        self.closed = True

    def _one(self, i, j, prompt, sampling, seed, k) -> Rollout:
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * i + j)
        tokens, logprobs, ids, heads, reason = [], [], [], [], "length"
        for _ in range(sampling.max_tokens):
            logits = self.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].float()
            log_q = (logits / sampling.temperature).log_softmax(-1)
            token = log_q.argmax() if sampling.greedy else log_q.exp().multinomial(1, generator=generator)[0]
            tokens.append(int(token))
            logprobs.append(float(log_q[token]))
            if k:
                head = log_q.topk(k)
                ids.append(head.indices.numpy())
                heads.append(head.values.numpy())
            if tokens[-1] in sampling.stop_token_ids:
                reason = "stop"
                break
        return Rollout(
            prompt_index=i,
            sample_index=j,
            prompt_ids=np.array(prompt, dtype=np.int32),
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            candidate_ids=np.stack(ids).astype(np.int32) if k else None,
            candidate_logprobs=candidates.round_logprobs(np.stack(heads)) if k else None,
            finish_reason=reason,
        )


@pytest.fixture(scope="session")
def emulated_engine() -> type[EmulatedEngine]:
    return EmulatedEngine
