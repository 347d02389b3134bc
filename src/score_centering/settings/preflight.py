"""What can be known before the first job: settings that no machine can run, and what this machine lacks. No torch."""

import ctypes
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from score_centering.precision.registry import FORMATS
from score_centering.settings.errors import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.model import Settings
from score_centering.settings.registries import model_types

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, …_MINOR


def check_workflow(settings: Settings) -> None:
    """Refuse what would fail in a later job on any machine.

    Raises:
        UserError: one line that names the key: a model type that nothing here computes or quantises, K candidates of a
            smaller vocabulary.
    """
    model = settings.model
    if model.source == "scratch":
        _check_type(settings, model.scratch.architecture, "model.scratch.architecture")
    config = _known_config(settings)
    if config is None:
        return
    text = config.get("text_config", config)
    key = f"model.{model.source}"
    _check_type(settings, str(text.get("model_type")), f"{key}: model_type")
    k, vocabulary = settings.score_centering.top_logprobs_num, text.get("vocab_size")
    if isinstance(vocabulary, int) and k > vocabulary:
        raise UserError(
            f"score_centering.top_logprobs_num = {k} exceeds the vocabulary of {vocabulary} tokens of {key}"
        )


def check_machine(settings: Settings) -> None:
    """Refuse what this machine lacks.

    Raises:
        UserError: one line that names the key: no CUDA device, verl or vLLM not installed, no kernel for the rollouts'
            number format.
    """
    for key, value, package in (
        ("trainer.name", settings.trainer.name, "verl"),
        ("actor_rollout_ref.rollout.name", settings.actor_rollout_ref.rollout.name, "vllm"),
    ):
        if value == package and find_spec(package) is None:
            raise UserError(
                f"{key} = {value!r}: {package} is not installed here (docs/full-scale.md; local is built in)"
            )
    require_device(settings.runtime.device)
    rollout = settings.actor_rollout_ref.rollout
    if rollout.name == "vllm" and settings.runtime.device == "cuda" and rollout.quantization is not None:
        require_kernel(rollout.quantization, cuda_capability())


def require_kernel(quantization: str, capability: tuple[int, int]) -> None:
    """Refuse a number format that vLLM has no kernel for on a GPU of this compute capability.

    Raises:
        UserError: one line that names the format, the GPU and what the format needs.
    """
    needed = FORMATS[quantization].min_capability
    if 10 * capability[0] + capability[1] < needed:
        raise UserError(
            f"actor_rollout_ref.rollout.quantization = {quantization!r}: vLLM has no kernel for it on a GPU of compute "
            f"capability {capability[0]}.{capability[1]}, it needs {needed // 10}.{needed % 10}"
        )


def require_architecture(folder: Path, engine: str) -> None:
    """Refuse a model in `folder` that the rollout engine of this name does not compute.

    Raises:
        UserError: one line with the list; or there is no config.json.
    """
    config = read_json(folder / "config.json")
    model_type = str(config.get("text_config", config).get("model_type"))
    if engine == "local" and model_type not in model_types():
        raise UserError(f"{folder}: model_type {model_type!r}: the local engine computes {', '.join(model_types())}")


def require_device(device: str) -> None:
    """Refuse `cuda` where the driver shows no device.

    Raises:
        UserError: one line that names the key.
    """
    if device == "cuda" and cuda_devices() == 0:
        raise UserError("runtime.device = 'cuda': there is no CUDA device here (cpu is the other choice)")


def cuda_devices() -> int:
    """GPUs that the driver shows to this process, by `CUDA_VISIBLE_DEVICES` too."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_capability() -> tuple[int, int]:
    """Compute capability (major, minor) of the first GPU that the driver shows to this process; there has to be one."""
    driver, device, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    found = []
    for attribute in _CAPABILITY:
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            raise UserError("runtime.device = 'cuda': the driver does not tell the GPU's compute capability")
        found.append(value.value)
    return found[0], found[1]


def _check_type(settings: Settings, model_type: str, key: str) -> None:
    if "moe" in model_type:
        raise UserError(
            f"{key} = {model_type!r}: a mixture of experts can't go through the workflow, whose W8A8 stage quantises "
            "dense models only; train one by hand (docs/routing-replay.md)"
        )
    if settings.actor_rollout_ref.rollout.name == "local" and model_type not in model_types():
        raise UserError(f"{key} = {model_type!r}: the local engine computes {', '.join(model_types())}")


def _known_config(settings: Settings) -> dict[str, Any] | None:
    """config.json of the model, where it lies on this machine."""
    model = settings.model
    if model.source == "path":
        folder = Path(model.path.path)
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path.path = {model.path.path!r}: no folder with a config.json")
        return read_json(folder / "config.json")
    if model.source != "hub":
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.hub.repo, "config.json", revision=model.hub.revision)
    return json.loads(Path(cached).read_text(encoding="utf-8")) if isinstance(cached, str) else None
