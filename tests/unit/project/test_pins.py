"""One set of pins: pyproject.toml, requirements/*.lock, environment.yml and what is installed agree."""

import importlib
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = read_pins("cpu.lock")
B200 = read_pins("b200.lock")
TEST = read_pins("test.lock")
EXTRAS = {name: pins(lines) for name, lines in PROJECT["optional-dependencies"].items()}
DIRECT = pins(PROJECT["dependencies"]) | EXTRAS.pop("pipeline")  # both are the default environment


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


def b200_overrides() -> tuple[dict[str, str], set[str]]:
    """Versions laid over everything, and packages that are left out (by a marker that never holds)."""
    lines = (ROOT / "requirements/b200-overrides.txt").read_text().splitlines()
    left_out = {normalised(line.partition("==")[0]) for line in lines if "python_version" in line}
    return pins([line for line in lines if "python_version" not in line]), left_out


def test_the_full_scale_lock_holds_the_extras():
    for extra, asked in EXTRAS.items():
        assert {name: B200.get(name) for name in asked} == asked, extra
    assert {"verl", "vllm"} <= B200.keys() and EXTRAS.keys() == {"verl", "vllm"}


def test_the_full_scale_lock_differs_from_the_default_one_where_its_overrides_say():
    versions, left_out = b200_overrides()
    assert versions.items() <= B200.items()
    expected = {name: versions.get(name, version) for name, version in DIRECT.items() if name not in left_out}
    assert {name: B200.get(name) for name in expected} == expected
    assert not left_out & B200.keys()


def test_what_the_full_scale_lock_leaves_out_prepares_w8a8_in_the_default_environment():
    assert b200_overrides()[1] == {"llmcompressor"}
    assert CPU["compressed-tensors"] != B200["compressed-tensors"], "otherwise one lock would do"


def test_vllm_finds_its_plugin():
    (value,) = PROJECT["entry-points"]["vllm.general_plugins"].values()
    module, _, function = value.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_conda_users_get_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    by_pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pins(by_pip) == DIRECT


def test_the_locked_versions_are_installed():
    locked = CPU | TEST
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    versions = {normalised(name): version.partition("+")[0] for name, version in installed.items()}
    assert {name: versions.get(name) for name in locked} == locked
