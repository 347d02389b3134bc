from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

_LARGEST = 0x7F7F


@pytest.fixture(scope="session")
def bf16_rows() -> Callable[[int, int], Tensor]:
    return _bf16_rows


def _bf16_rows(seed: int, n_columns: int) -> Tensor:
    """(6, n_columns) finite bfloat16: a zero row, a constant, random bits (subnormal to largest), three magnitudes."""
    rng = np.random.default_rng(seed)
    constant = torch.full((n_columns,), float(rng.normal() * 2.0 ** rng.integers(-40, 40)))
    bits = (
        rng.integers(0, _LARGEST + 1, n_columns, dtype=np.uint16) | rng.integers(0, 2, n_columns, dtype=np.uint16) << 15
    )
    any_finite = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    normal = [torch.from_numpy(rng.normal(size=n_columns) * 2.0**exponent) for exponent in rng.integers(-120, 40, 3)]
    return torch.stack([row.to(torch.bfloat16) for row in (torch.zeros(n_columns), constant, any_finite, *normal)])
