"""torchvision from PyPI beside torch without CUDA: its Python part wants operators that only its compiled part defines.

vLLM's Qwen3.5 module imports torchvision for image inputs, which nothing here uses, so naming the operators is enough.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

# A build for the CPU carries a local version ("+cpu") and defines the operators itself.
if (
    torch.version.cuda is None
    and importlib.util.find_spec("torchvision")
    and "+" not in importlib.metadata.version("torchvision")
):
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(scope="session")
def child_path(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH: what this file does for the tests' process, for each process that they start."""
    folder = tmp_path_factory.mktemp("child_path")
    (folder / "sitecustomize.py").write_text(f"import runpy\nKEPT = runpy.run_path({__file__!r})\n")
    return folder
