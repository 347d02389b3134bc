import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that writes an invented experiment."""
    spec = importlib.util.spec_from_file_location(
        "synthetic_experiment", Path(__file__).with_name("synthetic_experiment.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six arms, one seed, 40 steps. Read only."""
    return synthetic.write_experiment(tmp_path_factory.mktemp("experiment") / "tiny", steps=40)
