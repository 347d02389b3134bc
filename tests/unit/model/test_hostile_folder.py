"""A model folder that carries code or pickles: refused in one line, nothing of it runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from score_centering.model.sources import load_folder
from score_centering.settings import UserError


class Touch:
    """Unpickling it makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load_folder(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    return str(error.value)


def test_code_of_the_folder_never_runs(tmp_path):
    marker = tmp_path / "ran"
    folder = tmp_path / "it's a model"
    folder.mkdir()
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass C: pass\nclass M: pass\n"
    )
    automatic = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.C", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": automatic}))
    refused(folder)
    assert not marker.exists()


def test_pickled_weights_are_not_read(tmp_path):
    marker = tmp_path / "ran"
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape, "num_key_value_heads": 1}))
    torch.save({"lm_head.weight": Touch(marker)}, tmp_path / "pytorch_model.bin")
    assert "safetensors" in refused(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "none such"}'])
def test_a_broken_config_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path)


def test_a_missing_folder_is_one_line(tmp_path):
    shutil.rmtree(tmp_path)
    refused(tmp_path)
