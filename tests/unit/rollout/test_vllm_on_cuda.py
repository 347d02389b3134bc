"""What the vLLM engine would be started with on a GPU, seen without one."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from score_centering.precision import listed_linears
from score_centering.precision.fp8 import FORMAT as FP8
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.precision.registry import Precision, format_of
from score_centering.rollout import Sampling
from score_centering.rollout.make_engine import EngineOptions, make_engine
from score_centering.rollout.vllm import VllmEngine, check_prompts
from score_centering.rollout.vllm_plugin import FAST_ROTATION, choose_rotation
from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import ValidationStage
from score_centering.validation.stage import engine_of

CONFIG = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    tie_word_embeddings=True, architectures=["Qwen3_5ForCausalLM"],
)  # fmt: skip


def engine(folder, **changed) -> VllmEngine:
    CONFIG.save_pretrained(folder)
    sizes = {"max_batch": 8, "max_prompt_length": 16, "max_response_length": 16, "max_logprobs": 128}
    return VllmEngine(folder, kv_cache="int4_per_token_head", device="cuda", **(sizes | changed))


def test_the_text_model_runs_inside_the_multimodal_class(tmp_path):
    made = engine(tmp_path)
    assert made._config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    expected = {
        "language_model_only": True, "gdn_prefill_backend": "triton", "linear_backend": "auto",
        "attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int4_per_token_head", "max_logprobs": 128,
        "logprobs_mode": "processed_logprobs", "enable_chunked_prefill": False,
    }  # fmt: skip
    assert made._arguments | expected == made._arguments


def test_linear_attention_that_would_go_on_from_another_request_s_state_is_refused(tmp_path):
    made = engine(tmp_path)
    made.llm = SimpleNamespace()
    with pytest.raises(UserError, match=r"^rollout engine vllm: prompt 1 has 1 token; a model with gated linear"):
        made.generate([[5, 6], [7]], 2, Sampling(1.0, 4, False, ()), 0, 0)
    check_prompts([[7]], LlamaConfig().to_dict())


def test_weights_get_that_class_s_names_and_a_tied_tensor_goes_once(tmp_path):
    weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()
    stored = engine(tmp_path)._as_stored(weights)
    assert len(stored) == len(weights) - 1 and "lm_head.weight" not in stored
    assert all(name.startswith("model.language_model.") for name in stored)


def test_a_scheme_of_the_multimodal_class_lists_the_text_model_s_layers():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    gates = [f"layers.0.linear_attn.in_proj_{kind}" for kind in "ab"]
    listed = [
        listed_linears(
            {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", *(prefix + g for g in gates)])},
            model,
        )
        for prefix in ("model.", "model.language_model.")
    ]
    assert listed[0] == listed[1] and not [name for name in listed[0] if name.endswith(("in_proj_a", "in_proj_b"))]


@pytest.mark.parametrize(("variable", "flag"), [(None, False), ("0", False), ("1", None)])
def test_the_fast_rotation_is_off_unless_asked_for(variable, flag, monkeypatch):
    names = ["vllm", "vllm.platforms", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"]
    kernels = ModuleType("vllm.v1.attention.ops.int4_per_token_head")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    sys.modules["vllm.v1.attention.ops"].int4_per_token_head = kernels
    kernels._HADACORE_AVAILABLE = True
    if variable is None:
        monkeypatch.delenv(FAST_ROTATION, raising=False)
    else:
        monkeypatch.setenv(FAST_ROTATION, variable)
    choose_rotation()
    assert kernels._HADACORE_AVAILABLE is flag


def test_validation_starts_each_precision_from_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    places = {None: tmp_path / "base"}
    CONFIG.save_pretrained(places[None])
    content = json.loads((places[None] / "config.json").read_text())
    for used in (INT8, FP8):
        places[used.name] = tmp_path / used.name / "config.json"
        places[used.name].parent.mkdir()
        scheme = used.quantization_config(["Linear"], ["lm_head"])
        places[used.name].write_text(json.dumps(content | {"quantization_config": scheme}))
    stage = ValidationStage.of(
        load_settings(["config/config.yaml"], ["actor_rollout_ref.rollout.name=vllm", "runtime.device=cuda"])
    )
    subject = SimpleNamespace(model=SimpleNamespace(config=CONFIG))
    precisions = [Precision(None, "auto"), Precision("int8", "int4_per_token_head"), Precision("fp8", "auto")]
    made = {used.name: engine_of(stage, used, subject, places, 64) for used in precisions}
    found = {
        name: (engine.checkpoint.name, engine._arguments["kv_cache_dtype"], engine._arguments["linear_backend"])
        for name, engine in made.items()
    }
    assert found == {
        "bf16": ("base", "auto", "auto"),
        "int8_int4kv": ("int8", "int4_per_token_head", "triton"),
        "fp8": ("fp8", "auto", "auto"),
    }
    assert made["fp8"]._arguments["max_logprobs"] == 64, "the exact drift needs the whole vocabulary"


def test_a_format_without_a_kernel_on_this_gpu_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8.quantization_config(["Linear"], [])}))
    options = EngineOptions("vllm", Precision("fp8", "auto"), "cuda", 8, 8, 8)
    with pytest.raises(
        UserError, match=r"'fp8': vLLM has no kernel for it on a GPU of compute capability 8\.0, it needs 8\.9$"
    ):
        make_engine(options, CONFIG, tmp_path, tmp_path / "config.json")


def test_a_scale_of_a_whole_layer_is_refused_where_vllm_joins_linear_attention(tmp_path):
    scheme = format_of("nvfp4").quantization_config(["Linear"], [])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    options = EngineOptions("vllm", Precision("nvfp4", "auto"), "cuda", 8, 8, 8)
    with pytest.raises(
        UserError, match=r"'nvfp4': vLLM joins in_proj_qkv and in_proj_z of linear attention .*use the local engine$"
    ):
        make_engine(options, CONFIG, tmp_path, tmp_path / "config.json")
