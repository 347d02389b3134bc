"""The check of shapes and dtypes that docstrings tell, and that every public tensor function tells them."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import axis_names
from axis_names import Shape, WrongShape, check, parameters, results

ROOT = Path(__file__).parents[3]


def product(x, weight, mask=None, scale=None):
    """x (..., I) bfloat16 or float32, weight (O, I), scale (O / 2 + 1,), mask (B, S) or, packed, (N,) → (..., O)."""
    return x.new_zeros(*x.shape[:-1], len(weight))


def halves(rows):
    """Args:
    rows: (N, 2·D) float32, two a row.

    Returns two (N, D) tensors."""
    return rows.chunk(2, dim=-1)


def split(rows):
    """rows (N, M) → left (N, M/2) float32, right (N, M/2)."""
    left, right = rows.chunk(2, dim=-1)
    return (left, right) if rows[0, 0] >= 0 else (left, rows)


def test_what_a_docstring_tells():
    told = parameters(product)
    assert told["x"] == [Shape(("...", "I"), ("bfloat16", "float32"))]
    assert told["weight"] == [Shape(("O", "I"), ())]
    assert results(product) == [Shape(("...", "O"), ())]
    assert parameters(halves)["rows"] == [Shape(("N", "2·D"), ("float32",))]
    assert results(split) == [Shape(("N", "M/2"), ("float32",)), Shape(("N", "M/2"), ())]


def test_right_calls_pass():
    assert check(product)(torch.ones(2, 3, 5), torch.ones(4, 5)).shape == (2, 3, 4)
    check(product)(torch.ones(5), torch.ones(4, 5), scale=torch.ones(3))
    check(split)(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check(product)(torch.ones(2, 5), torch.ones(5, 4)), r"weight is \(5, 4\), must be \(O, I\) \(I = 5\)"),
        (lambda: check(product)(torch.ones(2, 5), torch.ones(4, 5, 1)), r"weight is \(4, 5, 1\), must be \(O, I\)"),
        (lambda: check(product)(torch.ones(5).double(), torch.ones(4, 5)), "x is torch.float64, must be bfloat16 or"),
        (lambda: check(product)(torch.ones(5), torch.ones(4, 5), scale=torch.ones(4)), r"scale is \(4,\)"),
        (lambda: check(halves)(torch.ones(3, 4, 1)), r"rows is \(3, 4, 1\)"),
        (lambda: check(split)(-torch.ones(3, 4)), r"the result is \(3, 4\), must be \(N, M/2\) \(N = 3, M = 4\)"),
    ],
)
def test_wrong_calls_are_told(call, message):
    with pytest.raises(WrongShape, match=message):
        call()


def modules() -> list[str]:
    """Modules of the checked rooms that can be imported without verl, Ray, vLLM and Triton."""
    found = []
    for room in axis_names.ROOMS:
        package = importlib.import_module(f"{axis_names.PACKAGE}.{room}")
        names = (each.name for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
        found += [name for name in names if not name.endswith(("_kernels", ".verl"))]
    return found


@pytest.mark.parametrize("name", modules())
def test_public_tensor_functions_tell_their_axes(name):
    untold = [
        f"{function.__name__}: {parameter}"
        for _, function in axis_names.public(importlib.import_module(name))
        for parameter, about in inspect.signature(function).parameters.items()
        if str(about.annotation) in ("<class 'torch.Tensor'>", "torch.Tensor | None")
        and parameter not in parameters(function)
    ]
    assert untold == []


def test_a_wrong_call_of_the_package_is_told():
    from score_centering.objectives import advantages
    from score_centering.validation.gaps import sampled_gaps

    with pytest.raises(WrongShape, match=r"log_q is \(1,\), must be \(T\) \(T = 4\)"):
        sampled_gaps(torch.zeros(4), torch.zeros(1))  # torch would broadcast it
    with pytest.raises(ValueError, match="must be one length"):  # refused by itself
        advantages(torch.ones(4), torch.zeros(3, dtype=torch.int64))
