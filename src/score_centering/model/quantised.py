"""Preparation of a quantised checkpoint by llm-compressor: no calibration data, the same bytes every time.

llm-compressor adds 1 to the norms of Qwen3.5 (stored as w − 1) and takes it off again in BF16, which moves most of
those weights by a rounding. Only the listed layers may change, so everything else is put back before saving, and the
saved bytes are compared with `precision.requantise` of the base weights: engine and trainer start from equal numbers.
"""

import importlib.metadata
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from score_centering.model.model_manifest import ModelManifest, digest_folder
from score_centering.precision import listed_linears, requantise
from score_centering.precision.format import Format
from score_centering.runs.files import make_folder, write_file
from score_centering.settings import UserError
from score_centering.settings.model_blocks import Quantization

SCHEMA_VERSION = 2
PACKAGES = ("compressed-tensors", "llmcompressor", "safetensors", "torch", "transformers")
# Tokenizer, chat template and generation settings travel along, so that an engine can open the folder by itself.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class QuantisedManifest:
    """What the folder of a quantised model holds.

    format, targets, ignore: as configured.  quantised_layers, ignored_layers: linear layers by name.
    base: source and file digests of the BF16 model it was made from.  files: sha256 by name.
    versions: of the libraries.
    """

    schema_version: int
    format: str
    targets: list[str]
    ignore: list[str]
    quantised_layers: list[str]
    ignored_layers: list[str]
    base: dict[str, Any]
    files: dict[str, str]
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        write_file(path, (json.dumps(asdict(self), indent=2, sort_keys=True) + "\n").encode())


def prepare_quantised(
    folder: Path, base: ModelManifest, used: Format, quantization: Quantization, output: Path
) -> QuantisedManifest:
    """Quantise the BF16 model in `folder` (described by `base`) into `output`; run it without a visible accelerator.

    Raises:
        UserError: the model is quantised already, its class is unknown, no layer would be quantised, or the format
            can't hold one of them.
    """
    model_class, config = _model_class(folder)
    with torch.device("meta"):
        skeleton = model_class(config)
    scheme = used.quantization_config(quantization.targets, quantization.ignore)
    listed = listed_linears({"quantization_config": scheme}, skeleton, str(folder))
    if not listed:
        raise UserError(f"quantization: targets {quantization.targets} without {quantization.ignore} match no layer")
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _compress(model, used, quantization)
    _put_back(model, before)
    make_folder(output)
    for stale in output.glob("*.safetensors*"):
        stale.unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        model.save_pretrained(output, save_compressed=True)
    _copy_companions(folder, output)
    made = output / "config.json"
    if listed_linears(json.loads(made.read_bytes()), skeleton, str(made)) != listed:
        raise RuntimeError(f"{output / 'config.json'}: llm-compressor quantised other layers than {quantization} lists")
    linears = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    _check_bytes(output, requantise(before, listed))
    return QuantisedManifest(
        schema_version=SCHEMA_VERSION,
        format=used.name,
        targets=list(quantization.targets),
        ignore=list(quantization.ignore),
        quantised_layers=list(listed),
        ignored_layers=[name for name in linears if name not in listed],
        base={"source": base.source, "files": base.files},
        files={name: digest for name, digest in digest_folder(output).items() if name != "manifest.json"},
        versions={package: importlib.metadata.version(package) for package in PACKAGES},
    )


def _model_class(folder: Path) -> tuple[type[transformers.PreTrainedModel], transformers.PreTrainedConfig]:
    """The class that the config names, since an engine looks the checkpoint up by that name, and the config."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        raise UserError(f"{folder}: config.json has a quantization_config; only a BF16 model can be quantised")
    architecture = (config.architectures or ["none"])[0]
    if not hasattr(transformers, architecture):
        raise UserError(f"{folder}: config.json names the class {architecture!r}, which transformers does not have")
    if hasattr(config, "num_experts"):
        raise UserError(
            f"{folder}: llm-compressor takes a mixture's experts apart, so none is quantised here; train.py takes BF16 "
            "rollouts (quantization: null), or a config.json that lists the layers (--quantised-config)"
        )
    return getattr(transformers, architecture), config


def _compress(model: transformers.PreTrainedModel, used: Format, quantization: Quantization) -> None:
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    scheme = QuantizationScheme(targets=list(quantization.targets), **used.scheme)
    recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=list(quantization.ignore))
    oneshot(model=model, recipe=recipe)


@torch.no_grad()
def _put_back(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Give every tensor that existed before its old value; codes are computed from these when the model is saved."""
    for name, tensor in model.state_dict().items():
        if name in before:
            tensor.copy_(before[name])


def _copy_companions(folder: Path, output: Path) -> None:
    for pattern in COMPANIONS:
        for file in folder.glob(pattern):
            if file.name not in ("config.json", "manifest.json") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, output / file.name)


def _check_bytes(output: Path, expected: Mapping[str, Tensor]) -> None:
    """The saved tensors are exactly `expected`; a tied tensor is saved under one of its names only."""
    for file in sorted(output.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name not in expected or not torch.equal(tensor, expected[name]):
                raise RuntimeError(f"{file}: {name} is not what requantising the base weights on a CPU gives")
