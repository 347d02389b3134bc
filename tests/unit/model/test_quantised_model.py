import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.model.model_manifest import ModelManifest, digest_folder
from score_centering.model.quantised import prepare_quantised
from score_centering.precision import listed_linears, requantise
from score_centering.precision.format import Format
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.registry import format_of
from score_centering.settings import UserError
from score_centering.settings.model_blocks import Quantization

QUANTIZATION = Quantization()
FORMATS = {
    "int8": "W8A8",
    "fp8": "FP8_DYNAMIC",
    "int4": "W4A16",
    "int4_channel": None,
    "nvfp4": "NVFP4A16",
    "mxfp8": "MXFP8",
}
"""Our names, and llm-compressor's preset where there is one."""

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Qwen3.5 text model with both kinds of attention, norms away from their initial value, a zero channel."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.model.layers[0].mlp.up_proj.weight[3] = 0.0
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def manifest_of(folder: Path) -> ModelManifest:
    return ModelManifest(1, {"kind": "path"}, str(folder), digest_folder(folder), 1, None, None, {})


@pytest.fixture(scope="module", params=FORMATS)
def used(request) -> Format:
    return format_of(request.param)


@pytest.fixture(scope="module")
def prepared(base, used, tmp_path_factory):
    output = tmp_path_factory.mktemp(used.name)
    return output, prepare_quantised(base, manifest_of(base), used, QUANTIZATION, output)


def layers_of(folder: Path) -> dict[str, Format]:
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig.from_pretrained(folder))
    return listed_linears(json.loads((folder / "config.json").read_text()), model)


def test_checkpoint_is_the_requantised_base_bit_for_bit(base, prepared):
    output, _ = prepared
    saved = load_file(output / "model.safetensors")
    expected = requantise(load_file(base / "model.safetensors"), layers_of(output))
    assert saved.keys() == expected.keys()
    assert all(same_bytes(saved[name], tensor) for name, tensor in expected.items())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name, preset in FORMATS.items() if preset])
def test_requantiser_equals_llm_compressor_alone(base, tmp_path, name, preset):
    """Without our preparation around it: every stored tensor is ours byte for byte, only norms differ by a rounding."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets=["Linear"], scheme=preset, ignore=list(QUANTIZATION.ignore))
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(tmp_path, save_compressed=True)
    saved = load_file(tmp_path / "model.safetensors")
    listed = layers_of(tmp_path)
    assert {each.name for each in listed.values()} == {name}
    expected = requantise(load_file(base / "model.safetensors"), listed)
    differing = [name for name, tensor in expected.items() if not same_bytes(saved[name], tensor)]
    assert differing and all("norm" in name for name in differing)


def test_layers_are_recorded_by_name(prepared):
    output, manifest = prepared
    assert manifest.quantised_layers == list(layers_of(output)) and len(manifest.quantised_layers) == 25
    gates = [f"model.layers.{layer}.linear_attn.in_proj_{gate}" for layer in range(3) for gate in "ba"]
    assert manifest.ignored_layers == [*gates, "lm_head"]
    assert sorted(json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]) == sorted(
        manifest.ignored_layers
    )


def test_manifest_names_files_base_and_versions(base, used, prepared):
    output, manifest = prepared
    assert manifest.files == digest_folder(output)
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= manifest.files.keys()
    assert manifest.base == {"source": {"kind": "path"}, "files": digest_folder(base)}
    assert {"llmcompressor", "compressed-tensors", "torch", "transformers"} <= manifest.versions.keys()
    manifest.write(output / "manifest.json")
    assert json.loads((output / "manifest.json").read_text())["format"] == used.name


def test_same_bytes_again_and_stale_weights_are_gone(base, used, prepared, tmp_path):
    _, manifest = prepared
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    assert prepare_quantised(base, manifest_of(base), used, QUANTIZATION, tmp_path).files == manifest.files


def test_quantised_base_is_refused(prepared, tmp_path):
    output, _ = prepared
    with pytest.raises(UserError, match="has a quantization_config; only a BF16 model can be quantised"):
        prepare_quantised(output, manifest_of(output), INT8, QUANTIZATION, tmp_path)


def test_a_mixture_of_experts_is_refused(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"takes a mixture's experts apart.*quantization: null.*--quantised-config"):
        prepare_quantised(tmp_path, manifest_of(base), INT8, QUANTIZATION, tmp_path / "out")


def test_nothing_to_quantise_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"match no layer"):
        prepare_quantised(base, manifest_of(base), INT8, Quantization(ignore=["re:.*"]), tmp_path)


def test_groups_that_do_not_divide_are_refused_with_the_layer(base, tmp_path):
    config = Qwen3_5TextConfig.from_pretrained(base)
    config.hidden_size, config.intermediate_size = 96, 192
    folder = tmp_path / "odd"
    Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    with pytest.raises(UserError, match=r"in_proj_qkv can't be quantised: int4: 96 input features, groups of 128 must"):
        prepare_quantised(folder, manifest_of(base), format_of("int4"), QUANTIZATION, tmp_path / "out")
