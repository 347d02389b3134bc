"""What a run was made from, and what of that forbids resuming it with something else."""

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import score_centering
from score_centering.settings import UserError
from score_centering.settings.dotted import differing
from score_centering.settings.inputs import read_json, sha256_file

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "math-verify")
BLOCKING = (
    "experiment",
    "arm",
    "seed",
    "config",
    "dataset_manifest_sha256",
    "model_manifest_sha256",
    "quantised_config_sha256",
    "trainer_revision",
    "device",
    "torch",
)


def make_identity(
    experiment: str,
    arm: str,
    seed: int,
    config: Mapping[str, Any],
    device: str,
    trainer_revision: int,
    dataset_manifest: Path | None = None,
    model_manifest: Path | None = None,
    quantised_config: Path | None = None,
) -> dict[str, Any]:
    """The identity of a run, as `open_run` keeps it: JSON values only.

    `config` is the resolved configuration the run depends on, `device` the kind of device ("cpu", or a GPU's name).
    """
    return {
        "experiment": experiment,
        "arm": arm,
        "seed": seed,
        "config": json.loads(json.dumps(config)),
        "config_sha256": json_digest(config),
        "dataset_manifest_sha256": _input_digest(dataset_manifest),
        "model_manifest_sha256": _input_digest(model_manifest),
        "quantised_config_sha256": _input_digest(quantised_config),
        "trainer_revision": trainer_revision,
        "device": device,
        "torch": version("torch"),
        "package_sha256": package_digest(),
        "versions": installed(),
    }


def read_identity(path: Path, key: str | None = None) -> dict[str, Any]:
    """The identity that a run left in `path` (state/identity.json), or below `key` of it (run.json).

    Raises:
        UserError: missing, not JSON, or no identity.
    """
    content = read_json(path)
    identity = content if key is None else content.get(key)
    if not isinstance(identity, dict) or not {*BLOCKING, "package_sha256", "versions"} <= identity.keys():
        raise UserError(f"{path}: holds no identity of a run")
    earlier = identity.get("earlier_package_sha256")
    if not isinstance(earlier, list) or not all(
        isinstance(code, str) for code in [*earlier, identity["package_sha256"]]
    ):
        raise UserError(f"{path}: holds no identity of a run")
    return identity


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that shape a run."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def json_digest(value: Any) -> str:
    """sha256 of the sorted JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def package_digest() -> str:
    """sha256 over the names and contents of the package's Python files."""
    root = Path(score_centering.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: tuple[str, ...] = BLOCKING) -> list[str]:
    """One phrase for each of `keys` that differs, nested ones by their dotted path."""
    return [
        f"{name}: {_show(before)} there, {_show(now)} here"
        for key in keys
        for name, (before, now) in differing([{key: old.get(key)}, {key: new.get(key)}]).items()
    ]


def _input_digest(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return sha256_file(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read this input of the run: {(error.strerror or str(error)).lower()}"
        ) from None


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:36]}…"
