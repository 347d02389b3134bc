from pathlib import Path
from types import ModuleType

import pytest

from loading import load


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that writes an invented experiment."""
    return load("unit/figures/synthetic_experiment.py")


@pytest.fixture(scope="session")
def tiny(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six arms, one seed, 40 steps. Read only."""
    return synthetic.write_experiment(tmp_path_factory.mktemp("experiment") / "tiny", steps=40)
