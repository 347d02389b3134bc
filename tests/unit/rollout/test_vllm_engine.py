"""The vLLM engine: its capture records anywhere, vLLM itself (CPU build) in the environment of `make test-vllm`."""

import importlib.util
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.precision import listed_linears, requantise
from score_centering.rollout import LocalEngine, Sampling, validate_all
from score_centering.rollout.vllm import VllmEngine, request_seed, to_rollout
from score_centering.settings import UserError

VOCABULARY = 512
PROMPTS = [[1, 26, 198, 178, 288, 105], [504, 267, 282], [90]]
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True
            },
        }
    },
}  # fmt: skip


@dataclass
class Flat:
    """The fields of vLLM's FlatLogprobs that are read."""

    token_ids: list[int]
    logprobs: list[float]
    start_indices: list[int]
    end_indices: list[int]


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: Flat
    finish_reason: str = "length"


def completion() -> Completion:
    """Two positions with K = 2: a sampled token inside the head, then one outside it."""
    flat = Flat([7, 7, 3, 9, 4, 5], [-0.5, -0.5, -1.2, -6.0, -0.25, -1.75], [0, 3], [3, 6])
    return Completion([7, 9], flat)


def test_flat_logprobs_become_a_capture_record():
    rollout = to_rollout(1, 2, [11, 12], completion(), 2)
    validate_all([rollout], VOCABULARY)
    assert (rollout.prompt_index, rollout.sample_index, rollout.finish_reason) == (1, 2, "length")
    assert rollout.token_ids.tolist() == [7, 9] and rollout.prompt_ids.tolist() == [11, 12]
    assert rollout.logprobs.tolist() == [-0.5, -6.0]
    assert rollout.candidate_ids.tolist() == [[7, 3], [4, 5]]
    assert rollout.candidate_logprobs.tolist() == [[-0.5, -1.2001953125], [-0.25, -1.75]]


def test_without_candidates_only_the_sampled_logprob_is_kept():
    rollout = to_rollout(0, 0, [11], Completion([7], Flat([7], [1e-7], [0], [1]), "stop"), 0)
    assert rollout.candidate_ids is None and rollout.candidate_logprobs is None
    assert rollout.logprobs.tolist() == [0.0], "a rounding above 0 is 0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.logprobs.end_indices.__setitem__(1, 5), "expected 3 everywhere"),
        (lambda c: c.token_ids.append(4), "3 tokens with"),
        (lambda c: c.token_ids.__setitem__(1, 4), "first log-prob of position 1 is not its token's"),
    ],
)
def test_a_record_of_another_shape_is_refused(change, message):
    broken = completion()
    change(broken)
    with pytest.raises(ValueError, match=message):
        to_rollout(0, 0, [11], broken, 2)


def test_every_rollout_has_its_own_seed():
    seeds = {request_seed(s, i, j) for s in (0, 1) for i in range(20) for j in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


def arguments(**changed):
    return {
        "kv_cache": "auto", "device": "cpu", "max_batch": 8, "max_prompt_length": 16, "max_response_length": 16,
        "max_logprobs": 32,
    } | changed  # fmt: skip


def test_the_int4_cache_is_refused_on_the_cpu(tmp_path):
    with pytest.raises(UserError, match=r"^rollout engine vllm: kv_cache_dtype int4_per_token_head needs a GPU"):
        VllmEngine(tmp_path, **arguments(kv_cache="int4_per_token_head"))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        VllmEngine(tmp_path, **arguments())


def test_generating_before_the_first_sync_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    engine = VllmEngine(tmp_path, **arguments())
    with pytest.raises(UserError, match="sync weights before generating"):
        engine.generate([[1]], 1, Sampling(1.0, 4, False, ()), 0, 0)
    engine.close()


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build is not installed")


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        )
    )  # fmt: skip


def tiny_qwen() -> Qwen3_5ForCausalLM:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM's Qwen3.5 module imports torchvision, whose CPU build is not on PyPI")
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen], ids=["llama", "qwen3_5"])
def checkpoints(request, tmp_path_factory):
    """A tiny model in BF16 and in W8A8: folder, weights and transformers config of each."""
    torch.manual_seed(0)
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)  # peaked next-token distributions, as a trained model has
    model = model.to(torch.bfloat16)
    bf16, w8a8 = tmp_path_factory.mktemp("bf16"), tmp_path_factory.mktemp("w8a8")
    model.config.save_pretrained(bf16)
    content = json.loads((bf16 / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    (bf16 / "config.json").write_text(json.dumps(content))
    (w8a8 / "config.json").write_text(json.dumps(content | {"quantization_config": W8A8}))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    listed = listed_linears({"quantization_config": W8A8}, model)
    return {"bf16": (bf16, weights, model.config), "w8a8": (w8a8, requantise(weights, listed), model.config)}


@needs_vllm
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_runs_the_w8a8_checkpoint_through_the_same_contract(checkpoints):
    folder, weights, config = checkpoints["w8a8"]
    engine = VllmEngine(folder, **arguments())
    engine.sync(weights, 3)
    assert engine.step == 3
    sampling = Sampling(1.0, 12, False, (2,))
    rollouts = engine.generate(PROMPTS, 4, sampling, 5, 32)
    validate_all(rollouts, VOCABULARY)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(i, j) for i in range(3) for j in range(4)]
    assert all(r.candidate_ids.shape == (len(r.token_ids), 32) for r in rollouts)
    assert all((r.finish_reason == "stop") == (r.token_ids[-1] == 2) for r in rollouts)
    again = engine.generate(PROMPTS, 4, sampling, 5, 0)
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in rollouts]
    assert again[0].candidate_ids is None

    greedy = engine.generate(PROMPTS, 1, Sampling(1.0, 12, True, (2,)), 0, 4)
    # the most probable token, or one that ties with it in BF16
    assert all(np.abs(r.logprobs - r.candidate_logprobs[:, 0]).max() < 1e-3 for r in greedy)

    local = LocalEngine(
        config, quantization="int8", w8a8_config={"quantization_config": W8A8}, kv_cache="auto", max_batch=8,
        max_prompt_length=16, max_response_length=16,
    )  # fmt: skip
    local.sync(weights, 3)
    first = local.generate(PROMPTS, 1, sampling, 5, VOCABULARY)
    for ours, theirs in zip(first, rollouts[::4], strict=True):
        # the first position has the same prefix in both engines
        dense = dict(zip(ours.candidate_ids[0].tolist(), ours.candidate_logprobs[0].tolist(), strict=True))
        gap = np.array([dense[int(t)] for t in theirs.candidate_ids[0]]) - theirs.candidate_logprobs[0]
        assert np.abs(gap).mean() < 0.2
    with pytest.raises(UserError, match="33 candidates asked for, allowed are 32"):
        engine.generate(PROMPTS, 1, sampling, 5, 33)
    engine.close()


@needs_vllm
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_a_sync_changes_the_weights(checkpoints):
    folder, weights, _ = checkpoints["bf16"]
    engine = VllmEngine(folder, **arguments())
    sampling = Sampling(1.0, 6, True, ())
    engine.sync(weights, 0)
    before = engine.generate(PROMPTS, 1, sampling, 0, 0)
    changed = dict(weights)
    changed["model.norm.weight"] = weights["model.norm.weight"] - 0.5
    engine.sync(changed, 1)
    other = engine.generate(PROMPTS, 1, sampling, 0, 0)
    engine.sync(weights, 2)
    after = engine.generate(PROMPTS, 1, sampling, 0, 0)
    engine.close()
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))
    assert any(not np.array_equal(a.logprobs, b.logprobs) for a, b in zip(before, other, strict=True))
