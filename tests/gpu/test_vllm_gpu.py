"""vLLM 0.25.0 on a GPU behind the protocol: captured graphs, INT8 linears, INT4 cache, Qwen3.5's head sizes."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from score_centering.precision import listed_linears, requantise
from score_centering.rollout import Sampling, validate_all
from score_centering.rollout.vllm import VllmEngine
from score_centering.settings import UserError
from score_centering.validation.repeatability import compare_repeats, poison_freed_memory
from vllm_models import W8A8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None, reason="needs CUDA and vLLM"
    ),
    pytest.mark.filterwarnings("ignore"),
]

CONFIG = Qwen3_5TextConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
    linear_value_head_dim=128, initializer_range=0.08, max_position_embeddings=512, tie_word_embeddings=True,
    architectures=["Qwen3_5ForCausalLM"], dtype="bfloat16",
)  # fmt: skip
PROMPTS = [np.random.default_rng(0).integers(3, 512, length).tolist() for length in (2, 3, 40, 27, 64, 63, 5, 33)]
GREEDY, SAMPLED = (Sampling(1.0, 32, greedy, (2,)) for greedy in (True, False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("w8a8")
    CONFIG.save_pretrained(path)
    content = json.loads((path / "config.json").read_text()) | {"quantization_config": W8A8}
    (path / "config.json").write_text(json.dumps(content))
    return path


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).cuda()
    listed = listed_linears({"quantization_config": W8A8}, model)
    return requantise({name: value.detach() for name, value in model.state_dict().items()}, listed)


def start(folder) -> VllmEngine:
    return VllmEngine(
        folder,
        kv_cache="int4_per_token_head",
        device="cuda",
        max_batch=32,
        max_prompt_length=64,
        max_response_length=32,
        max_logprobs=128,
        gpu_memory_utilization=0.05,
    )


def test_a_sync_under_captured_graphs_equals_a_fresh_engine_to_the_last_bit(folder):
    engine = start(folder)
    engine.sync(weights(0), 0)
    before = engine.generate(PROMPTS, 2, GREEDY, 0, 8)
    for step in (1, 2, 3):
        engine.sync(weights(step % 2), step)
    after = engine.generate(PROMPTS, 2, GREEDY, 0, 8)
    engine.close()
    fresh = start(folder)
    fresh.sync(weights(1), 3)
    expected = fresh.generate(PROMPTS, 2, GREEDY, 0, 8)
    fresh.close()
    for a, b in zip(after, expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        np.testing.assert_array_equal(a.candidate_logprobs, b.candidate_logprobs)
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True))


def test_a_prompt_of_one_token_is_refused(folder):
    engine = start(folder)
    engine.sync(weights(0), 0)
    with pytest.raises(UserError, match=r"^rollout engine vllm: prompt 0 has 1 token"):
        engine.generate([[5]], 1, GREEDY, 0, 0)
    engine.close()


def test_same_seeds_repeat_while_freed_memory_holds_nan(folder):
    engine = start(folder)
    engine.sync(weights(0), 0)
    rollouts = []
    for _ in range(3):
        poison_freed_memory("cuda")
        rollouts.append(engine.generate(PROMPTS, 4, SAMPLED, 5, 128))
    engine.close()
    validate_all(rollouts[0], CONFIG.vocab_size)
    assert all(rollout.candidate_ids.shape[1] == 128 for rollout in rollouts[0])
    for again in rollouts[1:]:
        found = compare_repeats(rollouts[0], again)
        assert found["not_finite_logprobs"] == 0 and found["equal_tokens_share"] == 1
