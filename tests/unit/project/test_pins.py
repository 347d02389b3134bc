"""One set of pins: pyproject.toml, requirements/*.lock, environment.yml and what is installed agree."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    """Normalised name → version; every line but comments must be a pin."""
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, f"not a pin: {line}"
            found[normalised(match[1])] = match[2]
    return found


def read_pins(name: str) -> dict[str, str]:
    return pins((ROOT / "requirements" / name).read_text().splitlines())


CPU = read_pins("cpu.lock")
TEST = read_pins("test.lock")
DIRECT = pins(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def test_the_default_lock_holds_every_direct_dependency():
    assert {name: CPU.get(name) for name in DIRECT} == DIRECT


def test_the_tests_add_packages_and_change_none():
    assert not CPU.keys() & TEST.keys()


def test_every_package_of_the_tests_is_locked():
    lines = (ROOT / "requirements/test.in").read_text().splitlines()
    asked = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    assert asked <= TEST.keys()


def test_the_override_is_the_locked_version():
    assert read_pins("overrides.txt").items() <= CPU.items()


def test_conda_users_get_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    by_pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pins(by_pip) == DIRECT


def test_the_locked_versions_are_installed():
    locked = CPU | TEST
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    versions = {normalised(name): version.partition("+")[0] for name, version in installed.items()}
    assert {name: versions.get(name) for name in locked} == locked
