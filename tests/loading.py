"""Modules beside the tests that no package holds, by their path."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load(path: str) -> ModuleType:
    """The module at `path` below tests/, run anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
