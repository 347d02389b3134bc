"""What is refused before the first job, in one line that names the key."""

import argparse
import json
from pathlib import Path

import pytest

from score_centering.model.model_manifest import ModelManifest, verified_folder
from score_centering.objectives.weights import WEIGHTS
from score_centering.rollout.local.architecture import FAMILIES
from score_centering.settings import UserError, cli, load_settings, preflight
from score_centering.settings.preflight import check_machine, check_workflow, require_device
from score_centering.settings.registries import model_types, registered, weight_names

ROOT = Path(__file__).parents[3]


def settings(*overrides: str, preset: str | None = None):
    files = [ROOT / "config/config.yaml", *([ROOT / f"config/{preset}.yaml"] if preset else [])]
    return load_settings(files, overrides)


def test_names_read_from_source_are_those_of_the_registries():
    assert weight_names() == tuple(WEIGHTS)
    assert model_types() == tuple(FAMILIES)
    with pytest.raises(LookupError):
        registered("objectives/weights.py", "NONE")


@pytest.mark.parametrize("preset", [None, "smol", "b200", "test"])
def test_every_preset_passes(preset):
    check_workflow(settings(preset=preset))


def test_a_weight_that_is_not_registered():
    with pytest.raises(UserError, match=r"^score_centering\.is_mode: 'clip3' is not one of none, importance, tis, mis"):
        settings("score_centering.is_mode=clip3")


def model(folder: Path, **config) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return ["model.source=path", f"model.path.path={folder}"]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"model_type": "gpt2", "vocab_size": 512},
            r"^model\.path: model_type = 'gpt2': the local engine computes llama",
        ),
        (
            {"model_type": "llama", "vocab_size": 1},
            r"^score_centering\.top_logprobs_num = 2 exceeds the vocabulary of 1 ",
        ),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, r"^model\.path: model_type = .*mixture of experts"),
    ],
)
def test_a_local_model_that_does_not_fit(tmp_path, config, line):
    with pytest.raises(UserError, match=line):
        check_workflow(settings(*model(tmp_path, **config)))


def test_a_local_model_that_fits_or_is_not_there(tmp_path):
    check_workflow(settings(*model(tmp_path, model_type="llama", vocab_size=512)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"^model\.path\.path = .*: no folder with a config\.json$"):
        check_workflow(settings("model.source=path", f"model.path.path={tmp_path}"))


def test_a_mixture_from_scratch_can_not_go_through_the_workflow():
    with pytest.raises(UserError, match=r"^model\.scratch\.architecture = 'qwen3_5_moe_text': a mixture of experts"):
        check_workflow(settings("model.scratch.architecture=qwen3_5_moe_text"))


def test_what_this_machine_lacks(monkeypatch):
    check_machine(settings())
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 0)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    for override, line in {
        "runtime.device=cuda": r"^runtime\.device = 'cuda': there is no CUDA device here",
        "trainer.name=verl": r"^trainer\.name = 'verl': verl is not installed here",
        "actor_rollout_ref.rollout.name=vllm": r"^actor_rollout_ref\.rollout\.name = 'vllm': vllm is not installed",
    }.items():
        with pytest.raises(UserError, match=line):
            check_machine(settings(override))
    require_device("cpu")
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 1)
    require_device("cuda")


@pytest.mark.parametrize(
    ("quantization", "capability", "needed"),
    [("mxfp8", (9, 0), "10.0"), ("fp8", (8, 6), "8.9"), ("int8", (7, 0), "7.5")],
)
def test_a_format_that_the_gpu_has_no_kernel_for(quantization, capability, needed, monkeypatch):
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 1)
    monkeypatch.setattr(preflight, "cuda_capability", lambda: capability)
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())
    overrides = [f"actor_rollout_ref.rollout.quantization={quantization}", "runtime.device=cuda"]
    check_machine(settings(*overrides))  # the local engine emulates it
    with pytest.raises(UserError) as refusal:
        check_machine(settings(*overrides, "actor_rollout_ref.rollout.name=vllm"))
    assert str(refusal.value) == (
        f"actor_rollout_ref.rollout.quantization = '{quantization}': vLLM has no kernel for it on a GPU of compute "
        f"capability {capability[0]}.{capability[1]}, it needs {needed}"
    )
    monkeypatch.setattr(preflight, "cuda_capability", lambda: (10, 0))
    check_machine(settings(*overrides, "actor_rollout_ref.rollout.name=vllm"))


def test_a_prepared_model_that_the_engine_does_not_compute(tmp_path):
    """Before its weights are read: none of its files exists."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ModelManifest(1, {}, ".", {"model.safetensors": "0" * 64}, 1, None, None, {}).write(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=r"model_type 'gpt2': the local engine computes llama, qwen2, qwen3, qwen3_5"):
        verified_folder(tmp_path / "manifest.json", "local")
    for engine in ("vllm", None):
        with pytest.raises(UserError, match=r"model\.safetensors: missing"):
            verified_folder(tmp_path / "manifest.json", engine)


@pytest.mark.parametrize("text", ["-1", "1.5", "x", ""])
def test_a_seed_is_a_whole_number(text):
    assert cli.seed("7") == 7
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number from 0 on"):
        cli.seed(text)
