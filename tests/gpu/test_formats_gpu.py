"""Every number format and cache on a GPU: the CPU's bytes, and an engine that repeats itself."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from score_centering.precision import requantise
from score_centering.precision.registry import CACHES, FORMATS, cache_format_of, format_of
from score_centering.rollout import LocalEngine, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, initializer_range=0.08, tie_word_embeddings=True,
)  # fmt: skip


def rows(count: int, seed: int) -> torch.Tensor:
    """(count, 256) bfloat16 of many magnitudes, with a zero row and a zero group."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 256, generator=generator) * torch.exp(3 * torch.randn(count, 1, generator=generator))
    x[0], x[1, :128] = 0.0, 0.0
    return x.to(torch.bfloat16)


def same_bytes(gpu: torch.Tensor, cpu: torch.Tensor) -> bool:
    gpu = gpu.cpu().contiguous()
    return gpu.dtype == cpu.dtype and torch.equal(gpu.view(torch.uint8), cpu.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_have_the_cpus_bytes(name):
    used = format_of(name)
    weights = {"a.q_proj": rows(40, 1), "a.k_proj": rows(24, 2), "a.v_proj": rows(24, 3), "b": rows(70, 4)}
    gpu = used.quantise({layer: weight.cuda() for layer, weight in weights.items()})
    cpu = used.quantise(weights)
    wrong = [
        (layer, part) for layer in weights for part in used.parts if not same_bytes(gpu[layer][part], cpu[layer][part])
    ]
    assert not wrong


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer_is_the_cpus_but_for_the_order_of_its_sum(name):
    used, x = format_of(name), rows(9, 5)
    stored = used.quantise({"layer": rows(40, 6)})["layer"]
    on_gpu = {part: tensor.cuda() for part, tensor in stored.items()}
    assert torch.equal(used.quantise_input(x.cuda()).cpu(), used.quantise_input(x))
    found, expected = used.linear(x.cuda(), on_gpu).cpu().double(), used.linear(x, stored).double()
    bound = used.quantise_input(x).abs() @ used.dequantise(stored).abs().T
    assert ((found - expected).abs() <= 2.0**-7 * bound + 1e-30).all()


@pytest.mark.parametrize("name", CACHES)
def test_cache_entries_have_the_cpus_bytes(name):
    cache, x = cache_format_of(name), rows(64, 7)
    assert same_bytes(cache.encode(x.cuda()), cache.encode(x))


@pytest.mark.parametrize(
    ("quantization", "kv_cache"), [*((name, "auto") for name in FORMATS), *((None, name) for name in CACHES)]
)
def test_an_engine_repeats_itself_and_is_near_the_cpus(quantization, kv_cache):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    scheme = None
    if quantization is not None:
        scheme = {"quantization_config": format_of(quantization).quantization_config(["Linear"], ["lm_head"])}
    prompts = [np.random.default_rng(i).integers(0, 512, 12).tolist() for i in range(8)]
    made = {}
    for device in ("cuda", "cpu"):
        engine = LocalEngine(
            CONFIG, quantised_config=scheme, kv_cache=kv_cache, max_batch=16, max_prompt_length=16,
            max_response_length=1, device=device,
        )  # fmt: skip
        weights = requantise({name: value.detach() for name, value in model.named_parameters()}, engine.listed)
        engine.sync({name: value.to(device) for name, value in weights.items()}, 0)
        sampling = Sampling(1.0, 1, False, ())
        made[device] = engine.generate(prompts, 2, sampling, 0, 512)
        again = engine.generate(prompts, 2, sampling, 0, 512)
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(made[device], again, strict=True))
    gaps = []
    for gpu, cpu in zip(made["cuda"], made["cpu"], strict=True):
        order = [np.argsort(rollout.candidate_ids[0]) for rollout in (gpu, cpu)]
        gaps.append(np.abs(gpu.candidate_logprobs[0][order[0]] - cpu.candidate_logprobs[0][order[1]]).mean())
    assert np.mean(gaps) < 0.1
