"""The local engine on a GPU: captured graphs, rows independent to the bit, weights synced under captured graphs."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from score_centering.precision import int4_kv, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Sampling, validate_all
from score_centering.rollout.local import forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QWEN = Qwen3_5TextConfig(
    vocab_size=3000,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
MIXTURE = Qwen3_5MoeTextConfig(
    **{key: value for key, value in QWEN.to_diff_dict().items() if key not in ("intermediate_size", "model_type")},
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=16,
    num_experts_per_tok=4,
)
LLAMA = LlamaConfig(
    vocab_size=3000,
    hidden_size=192,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.1,
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}
LOW = {"quantised_config": W8A8, "kv_cache": "int4_per_token_head"}
BF16 = {"quantised_config": None, "kv_cache": "auto"}
SAMPLING = Sampling(temperature=1.0, max_tokens=40, greedy=False, stop_token_ids=tuple(range(150)))
GREEDY = Sampling(temperature=1.0, max_tokens=40, greedy=True, stop_token_ids=(3,))
PROMPTS = [
    np.random.default_rng(0).integers(0, 3000, length).tolist() for length in (1, 2, 70, 90, 64, 65, 5, 33, 20, 11)
]


def weights_of(config, listed, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return requantise({name: parameter.detach() for name, parameter in model.named_parameters()}, listed)


def make(config, mode, device="cuda", max_batch=24):
    sizes = {"max_batch": max_batch, "max_prompt_length": 90, "max_response_length": 40}
    engine = LocalEngine(config, **mode, **sizes, device=device, record_routes=config is MIXTURE)
    engine.sync(weights_of(config, engine.listed), step=0)
    return engine


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        assert (a.prompt_index, a.sample_index, a.finish_reason) == (b.prompt_index, b.sample_index, b.finish_reason)
        for field in ("token_ids", "logprobs", "candidate_ids", "candidate_logprobs", "routes"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


CASES = pytest.mark.parametrize(
    ("config", "mode"),
    [(QWEN, LOW), (QWEN, BF16), (LLAMA, LOW), (LLAMA, BF16)],
    ids=["qwen3.5-low", "qwen3.5-bf16", "llama-low", "llama-bf16"],
)


@pytest.mark.parametrize(
    ("config", "mode"), [*CASES.args[1], (MIXTURE, LOW)], ids=[*CASES.kwargs["ids"], "mixture-low"]
)
def test_a_rollout_does_not_depend_on_what_shares_its_batch(config, mode):
    engine = make(config, mode)
    whole = engine.generate(PROMPTS, 4, SAMPLING, seed=7, top_logprobs=16)
    validate_all(whole, config.vocab_size)
    assert len({len(r.token_ids) for r in whole}) > 3
    assert_same(whole, engine.generate(PROMPTS, 4, SAMPLING, seed=7, top_logprobs=16))
    assert_same(whole[:4], engine.generate(PROMPTS[:1], 4, SAMPLING, seed=7, top_logprobs=16))
    others = [prompt if i % 3 == 2 else PROMPTS[(i + 4) % 10] for i, prompt in enumerate(PROMPTS)]
    mixed = engine.generate(others, 4, SAMPLING, seed=7, top_logprobs=16)
    assert_same([r for r in whole if r.prompt_index % 3 == 2], [r for r in mixed if r.prompt_index % 3 == 2])


def fill_freed_memory_with_nan() -> None:
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in (64, 4096, 1 << 18, 1 << 22) for _ in range(64)
    ]
    torch.cuda.synchronize()
    del blocks


@CASES
def test_same_seeds_give_the_same_tokens_when_freed_memory_holds_nan(config, mode):
    fill_freed_memory_with_nan()
    first = make(config, mode).generate(PROMPTS, 4, SAMPLING, seed=1, top_logprobs=16)
    fill_freed_memory_with_nan()
    engine = make(config, mode)
    assert_same(first, engine.generate(PROMPTS, 4, SAMPLING, seed=1, top_logprobs=16))
    fill_freed_memory_with_nan()
    assert_same(first, engine.generate(PROMPTS, 4, SAMPLING, seed=1, top_logprobs=16))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (16, 4, 256), (4, 4, 128)])
def test_decoding_attention_equals_the_cpu(heads, kv_heads, size):
    generator = torch.Generator().manual_seed(0)
    batch, positions = 5, 200
    kv = int4_kv.encode(torch.randn(batch, 2 * kv_heads, positions, size, generator=generator).bfloat16())
    new = torch.randn(batch, heads + 2 * kv_heads, 1, size, generator=generator).bfloat16()
    at = torch.tensor([0, 1, 63, 64, 199])

    def attend(device: str) -> torch.Tensor:
        where = at.to(device)
        hidden = (torch.arange(positions, device=device) > where[:, None])[:, None, None]
        rows, empty = torch.arange(batch, device=device), torch.empty(0)
        step = forward.Step(rows=rows, positions=where[:, None], valid=None, hidden=hidden, cos=empty, sin=empty)
        return forward.attend(new.to(device), heads, kv.clone().to(device), step).float().cpu()

    torch.testing.assert_close(attend("cuda"), attend("cpu"), rtol=2**-7, atol=1e-3)


@CASES
def test_weights_synced_under_captured_graphs_equal_a_fresh_engine(config, mode):
    engine = make(config, mode)
    before = engine.generate(PROMPTS, 2, GREEDY, seed=0, top_logprobs=8)
    weights = {name: tensor.cuda() for name, tensor in weights_of(config, engine.listed, seed=1).items()}
    engine.sync(weights, step=1)
    after = engine.generate(PROMPTS, 2, GREEDY, seed=0, top_logprobs=8)
    fresh = make(config, mode)
    fresh.sync(weights, step=1)
    assert_same(after, fresh.generate(PROMPTS, 2, GREEDY, seed=0, top_logprobs=8))
    assert any((a.token_ids[0] != b.token_ids[0]) for a, b in zip(before, after, strict=True))


@CASES
def test_log_probs_agree_with_the_cpu(config, mode):
    """The first token, same context on both: equal codes, products summed in another order."""
    on_gpu, on_cpu = (
        make(config, mode, device).generate(PROMPTS, 1, GREEDY, seed=0, top_logprobs=3000) for device in ("cuda", "cpu")
    )
    gaps = []
    for a, b in zip(on_gpu, on_cpu, strict=True):
        order_a, order_b = a.candidate_ids[0].argsort(), b.candidate_ids[0].argsort()
        gaps.append(np.abs(a.candidate_logprobs[0][order_a] - b.candidate_logprobs[0][order_b]).mean())
    print(f"mean gap {np.mean(gaps):.4f}, largest of a prompt {np.max(gaps):.4f}")
    assert np.mean(gaps) < 0.1
