"""Random generators and optimisers as tensors and JSON values, for checkpoints without pickle."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every global generator: torch on the CPU and on each GPU (uint8 tensors), Python's, NumPy's (JSON values)."""
    tensors = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }


def restore_rng_state(tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
    """Set what `rng_state` returned."""
    torch.set_rng_state(tensors["rng.torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensors[f"rng.cuda{index}"] for index in range(torch.cuda.device_count())])
    version, internal, gauss = scalars["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The per-parameter state of `optimizer` as `optimizer.<parameter index>.<name>`; every entry must be a tensor."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set what `optimizer_tensors` returned; learning rates and the like stay as the optimiser was built with."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
