"""torchvision from PyPI beside torch without CUDA: its Python part wants operators that only its compiled part defines.

vLLM's Qwen3.5 module imports torchvision for image inputs, which nothing here uses, so naming the operators is enough.
"""

import importlib.metadata
import importlib.util

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
