"""Shapes and dtypes that docstrings tell, checked at every call while tests run.

`x (..., I) bfloat16, weight (O, I) → (..., O)` in a docstring means: the axis I is one number in a call, and so is O.
`conftest` installs the check before a room of `ROOMS` is imported; outside of the tests nothing of it exists.
"""

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "score_centering"
ROOMS = ("objectives", "precision", "validation", "routing", "rollout.local", "training")
_DTYPE = r"(?:float64|float32|float16|bfloat16|int64|int32|int8|uint8|bool)"
_SHAPE = rf"\((?P<axes>[^()]*)\)(?: (?P<dtypes>{_DTYPE}(?:(?:, | or |, or ){_DTYPE})*)\b(?! else))?"
_DECLARED = re.compile(rf"`?\b(?P<names>[a-z]\w*(?:, [a-z]\w*)*)`?:? {_SHAPE}")
_RETURNED = re.compile(rf"(?:^|, )(?:[\w -]+ )?{_SHAPE}")
_ELLIPSES = ("...", "…")


@dataclass(frozen=True)
class Shape:
    """Axes: names, numbers or sums of both, the first one maybe an ellipsis. dtypes: allowed ones, empty for any."""

    axes: tuple[str, ...]
    dtypes: tuple[str, ...]


class WrongShape(AssertionError):
    """A call whose tensors are not what the docstring tells."""


def parameters(function: Callable[..., Any]) -> dict[str, list[Shape]]:
    """What the docstring tells of each parameter; several shapes are alternatives."""
    text, names = " ".join((function.__doc__ or "").split()), set(inspect.signature(function).parameters)
    told: dict[str, list[Shape]] = {}
    for match in _DECLARED.finditer(text.partition("→")[0] + text.partition("Args:")[2]):
        shapes, rest = [_shape(match)], match.string[match.end() :]
        while other := re.match(rf"[^()→:]{{0,40}}?, or {_SHAPE}", rest):
            shapes.append(_shape(other))
            rest = rest[other.end() :]
        for name in (name for name in match["names"].split(", ") if name in names):
            told.setdefault(name, shapes)
    return told


def results(function: Callable[..., Any]) -> list[Shape]:
    """What stands behind the arrow of the docstring, tensor by tensor."""
    first = " ".join((function.__doc__ or "").split()).partition("→")[2]
    return [_shape(match) for match in _RETURNED.finditer(re.split(r"[.:;](?: |$)", first)[0].strip())]


def _shape(match: re.Match[str]) -> Shape:
    axes = tuple(axis.strip() for axis in match["axes"].split(",") if axis.strip())
    return Shape(axes, tuple(re.findall(_DTYPE, match["dtypes"] or "")))


def check(function: FunctionType) -> Callable[..., Any]:
    """`function`, which raises WrongShape where it took or made a tensor that is not what its docstring tells."""
    told, returned, signature = parameters(function), results(function), inspect.signature(function)
    if not told and not returned:
        return function

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        where, sizes = f"{function.__module__}.{function.__qualname__}", {}
        pairs = [(name, each, told[name]) for name, each in given.items() if name in told and hasattr(each, "shape")]
        before = [(name, tensor.shape, tensor.dtype, shapes) for name, tensor, shapes in pairs]
        result = function(*arguments, **keywords)  # what it refuses itself is its own error
        _agree(where, before, sizes)
        made = result if isinstance(result, tuple) else (result,)
        if len(made) == len(returned) and all(hasattr(each, "shape") for each in made):
            told_of = zip(made, returned, strict=True)
            _agree(where, [("the result", each.shape, each.dtype, [shape]) for each, shape in told_of], sizes)
        return result

    return checked


def _agree(where: str, tensors: Sequence[tuple[str, Any, Any, list[Shape]]], sizes: dict[str, int]) -> None:
    """Raises WrongShape; tensors: (name, shape, dtype, what is told). Plain names first, so that sums can be told."""
    for exact in (False, True):
        for name, size, _, shapes in tensors:
            if not any(_fits(tuple(size), shape, sizes, exact) for shape in shapes):
                wanted = " or ".join(f"({', '.join(shape.axes)})" for shape in shapes)
                known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
                raise WrongShape(f"{where}: {name} is {tuple(size)}, must be {wanted} ({known})")
    for name, _, dtype, shapes in tensors:
        allowed = {dtype for shape in shapes for dtype in shape.dtypes}
        found = str(dtype).removeprefix("torch.")
        if allowed and all(shape.dtypes for shape in shapes) and found not in allowed:
            raise WrongShape(f"{where}: {name} is {dtype}, must be {' or '.join(sorted(allowed))}")


def _fits(size: tuple[int, ...], shape: Shape, sizes: dict[str, int], exact: bool) -> bool:
    """Whether `size` is `shape`; names that are new are added to `sizes` if it is. exact: sums count too."""
    axes = shape.axes
    if axes and axes[0] in _ELLIPSES:
        axes = axes[1:]
        if len(size) < len(axes):
            return False
        size = size[len(size) - len(axes) :]
    if len(size) != len(axes):
        return False
    found: dict[str, int] = {}
    for axis, length in zip(axes, size, strict=True):
        if axis.isidentifier():
            if sizes.get(axis, found.get(axis, length)) != length:
                return False
            found[axis] = length
        elif axis.isdecimal():
            if int(axis) != length:
                return False
        elif exact and (value := _value(axis, sizes | found)) is not None and not math.isclose(value, length):
            return False
    sizes |= found
    return True


def _value(text: str, sizes: dict[str, int]) -> float | None:
    """A sum such as D/2 + 4 or H + 2·Hkv; None where it is none (· is any size), or names what no tensor has."""
    formula = text.replace("·", "*").replace("−", "-")
    words = re.findall(r"[^\W\d]\w*", formula)
    if not re.fullmatch(r"[\w\s+*/-]+", formula) or not words or any(word not in sizes for word in words):
        return None
    return eval(formula, {"__builtins__": {}}, dict(sizes))


def public(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Public functions that `module` itself defines."""
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name, value


class _Finder:
    """Checks the functions of a module as soon as it has run."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(tuple(f"{PACKAGE}.{room}" for room in ROOMS)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_check(module: ModuleType) -> None:
                run(module)
                for name, function in public(module):
                    setattr(module, name, check(function))

            spec.loader.exec_module = run_and_check  # type: ignore[method-assign]
        return spec


def install() -> None:
    """From now on, modules of `ROOMS` are checked as they are imported."""
    if not any(isinstance(finder, type) and finder.__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
