"""Tampered checkpoints: refused at the load with one clear line, or caught by the gate."""

import copy

import pytest
import torch
from safetensors.torch import save_file

from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.requantising import identify
from score_centering.settings import UserError
from score_centering.validation.gate import failures
from score_centering.validation.layers import weight_errors
from score_centering.validation.quantised_checkpoint import (
    check_tensors,
    checkpoint_numbers,
    read_weights,
)

CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False,
                    "group_size": None,
                },
                "input_activations": {
                    "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True
                },
            }
        },
    }
}  # fmt: skip
LIMITS = {
    "weights.channel_max": {"max": 0.05},
    "checkpoint.mismatched_codes": {"max": 0},
    "checkpoint.mismatched_scales": {"max": 0},
    "checkpoint.changed_unlisted_tensors": {"max": 0},
    "checkpoint.quantised_weight_share": {"min": 0.9},
}
WHERE = "model/w8a8"


def numbers(tiny, w8a8, listed=None):
    listed = tiny.listed if listed is None else listed
    linears = [n for n, m in tiny.model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    largest = max(e["weight_channel_max"] for e in weight_errors(tiny.base, w8a8, listed).values())
    return checkpoint_numbers(tiny.base, w8a8, tiny.w8a8, listed, linears) | {"weights.channel_max": largest}


def test_an_honest_checkpoint_passes(tiny_qwen):
    assert identify(CONFIG, WHERE) is INT8
    check_tensors(tiny_qwen.base, tiny_qwen.w8a8, tiny_qwen.listed, WHERE)
    assert failures(numbers(tiny_qwen, tiny_qwen.w8a8), LIMITS) == []


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_one_scale_off_by_two_fails_the_gate(tiny_qwen, factor):
    w8a8 = {name: tensor.clone() for name, tensor in tiny_qwen.w8a8.items()}
    w8a8["model.layers.1.mlp.up_proj.weight_scale"][7] *= factor
    check_tensors(tiny_qwen.base, w8a8, tiny_qwen.listed, WHERE)
    lines = failures(numbers(tiny_qwen, w8a8), LIMITS)
    assert [line.split(" = ")[0] for line in lines] == ["weights.channel_max", "checkpoint.mismatched_scales"]
    assert lines[1] == "checkpoint.mismatched_scales = 1, limit max 0"


def test_one_changed_code_fails_the_gate(tiny_qwen):
    w8a8 = {name: tensor.clone() for name, tensor in tiny_qwen.w8a8.items()}
    w8a8["model.layers.1.mlp.up_proj.weight"][7, 3] ^= 1
    assert failures(numbers(tiny_qwen, w8a8), LIMITS) == ["checkpoint.mismatched_codes = 1, limit max 0"]


def test_a_layer_left_in_bf16_is_refused(tiny_qwen):
    name = "model.layers.2.mlp.gate_proj.weight"
    w8a8 = {**tiny_qwen.w8a8, name: tiny_qwen.base[name]}
    with pytest.raises(UserError, match=f"^{WHERE}: {name} is bfloat16, must be int8$"):
        check_tensors(tiny_qwen.base, w8a8, tiny_qwen.listed, WHERE)
    del w8a8[f"{name}_scale"]
    with pytest.raises(UserError, match=f"{name}_scale is missing, but the configuration lists model.layers.2.mlp"):
        check_tensors(tiny_qwen.base, w8a8, tiny_qwen.listed, WHERE)


def test_layers_hidden_from_the_configuration_fail_the_gate(tiny_qwen):
    listed = {name: used for name, used in tiny_qwen.listed.items() if ".mlp." not in name}
    kept = {f"{name}.weight" for name in tiny_qwen.listed if ".mlp." in name}
    w8a8 = {n: tiny_qwen.base[n] if n in kept else t for n, t in tiny_qwen.w8a8.items()}
    check_tensors(tiny_qwen.base, w8a8, listed, WHERE)
    lines = failures(numbers(tiny_qwen, w8a8, listed), LIMITS)
    assert any(line.startswith("checkpoint.quantised_weight_share = ") for line in lines)


def test_a_changed_norm_fails_the_gate(tiny_qwen):
    w8a8 = {**tiny_qwen.w8a8, "model.norm.weight": tiny_qwen.base["model.norm.weight"] + 1}
    assert failures(numbers(tiny_qwen, w8a8), LIMITS) == ["checkpoint.changed_unlisted_tensors = 1, limit max 0"]


def test_codes_of_an_unlisted_layer_are_refused(tiny_qwen):
    with pytest.raises(UserError, match="is int8, but the configuration does not list its layer"):
        check_tensors(tiny_qwen.base, tiny_qwen.w8a8, dict(list(tiny_qwen.listed.items())[1:]), WHERE)


def test_scales_by_group_are_refused(tiny_qwen):
    name = "model.layers.0.mlp.up_proj.weight_scale"
    w8a8 = {**tiny_qwen.w8a8, name: tiny_qwen.w8a8[name].repeat(1, 2)}
    with pytest.raises(UserError, match=r"up_proj.weight_scale has shape \(96, 2\), must be \(96, 1\)"):
        check_tensors(tiny_qwen.base, w8a8, tiny_qwen.listed, WHERE)


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("group_0", "weights", "strategy"), "group", "weights.strategy = 'group', must be 'channel'"),
        (("group_0", "weights", "strategy"), "tensor", "weights.strategy = 'tensor', must be 'channel'"),
        (("group_0", "weights", "group_size"), 128, "weights.group_size = 128, must be None"),
        (("group_0", "weights", "num_bits"), 4, "weights.num_bits = 4, must be 8"),
        (("group_0", "weights", "symmetric"), False, "weights.symmetric = False, must be True"),
        (("group_0", "input_activations"), None, "input_activations.num_bits = None, must be 8"),
        (("group_0", "input_activations", "dynamic"), False, "input_activations.dynamic = False, must be True"),
        (("group_0", "input_activations", "strategy"), "tensor", "strategy = 'tensor', must be 'token'"),
    ],
)
def test_a_wrong_group_or_strategy_is_refused(path, value, line):
    config = copy.deepcopy(CONFIG)
    target = config["quantization_config"]["config_groups"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(UserError) as error:
        identify(config, "config.json")
    assert str(error.value).startswith("config.json: quantization_config.config_groups.group_0.")
    assert str(error.value).endswith(line)


def test_a_bf16_model_is_no_quantised_checkpoint():
    with pytest.raises(UserError, match=r"config.json: no quantization_config: not a quantised checkpoint"):
        identify({"model_type": "qwen3_5_text"}, "config.json")


def test_weights_are_read_from_every_file(tmp_path):
    with pytest.raises(UserError, match=r"no \*.safetensors file"):
        read_weights(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert sorted(read_weights(tmp_path)) == ["a", "b"]
