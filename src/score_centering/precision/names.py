"""Parameter names of a text model and of the same model inside its multimodal class.

Transformers trains `Qwen3_5ForCausalLM` (`model.layers…`); the published checkpoint and vLLM 0.25.0 know the class
`Qwen3_5ForConditionalGeneration` only (`model.language_model.layers…`). Everything else has one name in both.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
TEXT, MULTIMODAL = "model.", "model.language_model."
NOT_TEXT = ("model.visual.", "mtp.")  # the vision tower, and the extra layer for several tokens at once
MULTIMODAL_CLASSES = {
    "Qwen3_5ForCausalLM": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
}
"""Class of a text model → model type and class of the multimodal model around it."""
MULTIMODAL_ARCHITECTURES = tuple(architecture for _, architecture in MULTIMODAL_CLASSES.values())


def text_name(name: str) -> str:
    """`model.language_model.X` → `model.X`; any other name as it is."""
    return TEXT + name.removeprefix(MULTIMODAL) if name.startswith(MULTIMODAL) else name


def multimodal_name(name: str) -> str:
    """`model.X` → `model.language_model.X`; a name that is already so, or lies outside of the model, as it is."""
    if name.startswith(MULTIMODAL) or not name.startswith(TEXT):
        return name
    return MULTIMODAL + name.removeprefix(TEXT)


def text_part(weights: Mapping[str, T]) -> dict[str, T]:
    """The text model's tensors of a checkpoint of either class, under the text model's names."""
    return {text_name(name): tensor for name, tensor in weights.items() if not name.startswith(NOT_TEXT)}


def needs_multimodal_class(config: Mapping[str, Any]) -> bool:
    """Whether `config` (of a config.json) is of a text model that vLLM 0.25.0 runs inside its multimodal class only."""
    return (config.get("architectures") or [""])[0] in MULTIMODAL_CLASSES


def multimodal_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the multimodal model around a text model: its text part is `config`, its vision part the default.

    Args:
        config: of a text model for which `needs_multimodal_class` holds, with or without a `quantization_config`.
    """
    model_type, architecture = MULTIMODAL_CLASSES[config["architectures"][0]]
    text = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
    shared = {key: text[key] for key in ("dtype", "tie_word_embeddings", "transformers_version") if key in text}
    whole = {"architectures": [architecture], "model_type": model_type, "text_config": text, **shared}
    if "quantization_config" in config:
        scheme = config["quantization_config"]
        whole["quantization_config"] = {**scheme, "ignore": [multimodal_name(entry) for entry in scheme["ignore"]]}
    return whole
