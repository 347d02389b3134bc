"""Names, requantising and completeness of a weight sync to vLLM, from models without storage."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3_5Config
from transformers.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig, Qwen3_5VisionConfig

from score_centering.precision import quantise_weight
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.names import multimodal_config, multimodal_name, text_name, text_part
from score_centering.precision.registry import format_of
from score_centering.precision.requantising import listed_linears, requantise
from score_centering.training.verl.server.vllm_sync import (
    Sync,
    engine_arguments,
    engine_overrides,
    engine_parameter,
    flat_caches,
    set_switches,
)

TEXT = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    tie_word_embeddings=True,
)  # fmt: skip
SCHEME = INT8.quantization_config(
    ["Linear"], ["lm_head", "model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_b"]
)
W8A8 = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "quantization_config": SCHEME}
ENGINE = multimodal_config(W8A8)


def names_of(config) -> list[str]:
    with torch.device("meta"):
        return list(AutoModelForCausalLM.from_config(config).state_dict())


def weights(config=TEXT) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [Qwen3_5TextConfig(), TEXT, LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True)],
    ids=["9 B", "tied", "llama"],
)
def test_every_engine_parameter_is_written_exactly_once(config):
    stored = [name for name in names_of(config) if not (config.tie_word_embeddings and name == "lm_head.weight")]
    targets = [engine_parameter(name) for name in stored]
    assert len(set(targets)) == len(targets) == len(stored)
    parts: dict[str, set[str]] = {}
    for parameter, part in targets:
        parts.setdefault(parameter, set()).add(part)
    complete = {"qkv_proj": {"q", "k", "v"}, "gate_up_proj": {"0", "1"}, "in_proj_qkvz": {"0, 1, 2", "3"}}
    complete |= {"in_proj_ba": {"0", "1"}}
    for parameter, found in parts.items():
        layer = parameter.split(".")[-2]
        assert found == complete.get(layer, {""}), parameter


def test_names_go_to_the_multimodal_class_and_back():
    for name in [*names_of(TEXT), "lm_head.weight_scale"]:
        assert text_name(multimodal_name(name)) == name == text_name(name)
    assert multimodal_name("lm_head.weight") == "lm_head.weight"
    assert multimodal_name("model.norm.weight") == "model.language_model.norm.weight"


def test_the_names_are_those_of_transformers_multimodal_class():
    vision = Qwen3_5VisionConfig(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
    with torch.device("meta"):
        whole = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=TEXT.to_dict(), vision_config=vision.to_dict())
        )
    assert set(text_part(whole.state_dict())) == set(names_of(TEXT))


def test_the_engine_gets_the_configuration_of_the_multimodal_class():
    assert ENGINE["architectures"] == ["Qwen3_5ForConditionalGeneration"] and ENGINE["model_type"] == "qwen3_5"
    assert ENGINE["text_config"]["model_type"] == "qwen3_5_text"
    assert "model.language_model.layers.0.linear_attn.in_proj_a" in ENGINE["quantization_config"]["ignore"]
    assert engine_overrides(ENGINE) == ("compressed-tensors", {"quantization_config": ENGINE["quantization_config"]})
    assert engine_arguments("Qwen3_5ForConditionalGeneration")["language_model_only"]
    assert "language_model_only" not in engine_arguments("LlamaForCausalLM")


def test_transformers_reads_that_configuration_as_the_same_text_model(tmp_path):
    text = TEXT.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(multimodal_config(text)))
    read = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert names_of(read) == names_of(TEXT)
    assert read.layer_types == TEXT.layer_types and read.tie_word_embeddings


@pytest.mark.parametrize("prefix", ["text", "multimodal"])
def test_buckets_become_the_bytes_of_a_quantised_checkpoint(prefix):
    given = weights()
    trained = {multimodal_name(name) if prefix == "multimodal" else name: value for name, value in given.items()}
    trained |= {"model.visual.patch_embed.proj.weight": torch.zeros(2)} if prefix == "multimodal" else {}
    sync = Sync(TEXT, ENGINE)
    items = list(trained.items())
    loaded = {}
    for start in range(0, len(items), 5):
        bucket = [(name, value.clone()) for name, value in items[start : start + 5]]
        loaded |= dict(sync.bucket(bucket))
        for _, value in bucket:
            value.fill_(torch.nan)  # the next bucket overwrites its memory
    sync.finish()
    name = "model.layers.1.self_attn.q_proj.weight"
    codes, scale = quantise_weight(given[name].bfloat16())
    assert torch.equal(loaded[multimodal_name(name)], codes)
    assert torch.equal(loaded[f"{multimodal_name(name)}_scale"], scale)
    gate = "model.layers.0.linear_attn.in_proj_a.weight"
    assert torch.equal(loaded[multimodal_name(gate)], given[gate].bfloat16())
    assert "lm_head.weight" not in loaded, "tied: the embedding is written once"
    assert all(torch.isfinite(value.float()).all() for value in loaded.values())
    assert sum(value.dtype == torch.int8 for value in loaded.values()) == 13


@pytest.mark.parametrize("name", ["int8", "fp8", "int4_channel", "nvfp4"])
def test_buckets_of_one_tensor_become_what_requantising_all_at_once_gives(name):
    """NVFP4's joined layers share a scale, so the first of them wait for the last."""
    scheme = {"quantization_config": format_of(name).quantization_config(["Linear"], SCHEME["ignore"])}
    sync, given, loaded = Sync(TEXT, {"architectures": ["LlamaForCausalLM"]} | scheme), weights(), {}
    for parameter, value in given.items():
        bucket = value.clone()
        loaded |= dict(sync.bucket([(parameter, bucket)]))
        bucket.fill_(torch.nan)
    sync.finish()
    whole = {parameter: value.bfloat16() for parameter, value in given.items() if parameter != "lm_head.weight"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TEXT)
    expected = requantise(whole, listed_linears(scheme, model))
    assert loaded.keys() == expected.keys()
    for stored, tensor in expected.items():
        assert torch.equal(loaded[stored].view(torch.uint8), tensor.view(torch.uint8)), stored


def test_bf16_rollouts_take_the_weights_as_they_are():
    sync = Sync(TEXT, {key: value for key, value in ENGINE.items() if key != "quantization_config"})
    loaded = dict(sync.bucket(weights().items()))
    sync.finish()
    assert {value.dtype for value in loaded.values()} == {torch.bfloat16}


def test_a_missing_a_repeated_and_an_unknown_parameter_are_refused():
    given = weights()
    sync = Sync(TEXT, ENGINE)
    list(sync.bucket((name, value) for name, value in given.items() if name != "model.norm.weight"))
    with pytest.raises(ValueError, match=r"^weight sync: model\.norm\.weight did not come \(1 of 27 are missing\)"):
        sync.finish()
    with pytest.raises(ValueError, match=r"^weight sync: model\.embed_tokens\.weight came twice"):
        list(sync.bucket([("model.embed_tokens.weight", given["model.embed_tokens.weight"])]))
    with pytest.raises(ValueError, match=r"^weight sync: model\.other is no parameter of this model"):
        list(sync.bucket([("model.other", torch.zeros(1))]))


def test_caches_of_gated_linear_attention_are_listed_one_by_one():
    attention, convolution, state = (torch.ones(2) for _ in range(3))
    flat = flat_caches([[convolution, state], attention])
    for cache in flat:
        cache.zero_()
    assert len(flat) == 3 and not any(cache.any() for cache in (attention, convolution, state))


def test_a_switch_that_is_off_reaches_the_engine():
    args = Namespace(enable_chunked_prefill=None, enable_prefix_caching=None, seed=1)
    set_switches(args, Namespace(enable_chunked_prefill=False, enable_prefix_caching=False, seed=2))
    assert vars(args) == {"enable_chunked_prefill": False, "enable_prefix_caching": False, "seed": 1}
