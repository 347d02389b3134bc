"""Which runs were made by other code, settings or inputs than today's, and which declared files were changed since.

It only reads, and starts nothing: code edits retrain no run by themselves, so this is where they show.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from score_centering.runs.files import sha256_file
from score_centering.runs.identity import differences, installed, package_digest
from score_centering.runs.lock import in_use
from score_centering.runs.log import read_log
from score_centering.settings import UserError


@dataclass(frozen=True)
class Audit:
    """One run: its state in words, how it differs from today, and what is damaged."""

    run_dir: Path
    state: str
    differs: tuple[str, ...]
    damaged: tuple[str, ...]

    def line(self) -> str:
        phrases = [*(f"DAMAGED: {phrase}" for phrase in self.damaged), *self.differs]
        return f"{self.run_dir}: {self.state}; {'; '.join(phrases) or 'made by the code and settings of today'}"


def audit(experiment: Path, configs: Mapping[str, Mapping[str, Any]]) -> list[Audit]:
    """Every run below `experiment`/runs, compared with today's code, installed versions and `configs` (by arm).

    Raises:
        UserError: the folder holds no run.
    """
    marks = [path for name in ("state", "run.json") for path in (experiment / "runs").glob(f"*/seed*/{name}")]
    folders = sorted({path.parent for path in marks})
    if not folders:
        raise UserError(f"{experiment}: holds no run; give the folder of one experiment, such as results/tiny")
    today = _today(experiment)
    return [_audit_run(folder, {**today, "config": configs.get(folder.parent.name)}) for folder in folders]


def _today(experiment: Path) -> dict[str, Any]:
    """The part of today's identity that all runs share; inputs that are not there are not compared."""
    manifests = {"dataset_manifest_sha256": "dataset/manifest.json", "model_manifest_sha256": "model/manifest.json"}
    paths = {key: experiment / name for key, name in manifests.items()}
    inputs = {key: sha256_file(path) for key, path in paths.items() if path.is_file()}
    return {"package_sha256": package_digest(), "versions": installed(), **inputs}


def _audit_run(run_dir: Path, today: Mapping[str, Any]) -> Audit:
    state = run_dir / "state"
    try:
        published = json.loads((state / "PUBLISHED").read_bytes()) if (state / "PUBLISHED").is_file() else None
        if state.is_dir():
            identity = json.loads((state / "identity.json").read_bytes())
        else:
            identity = json.loads((run_dir / "run.json").read_bytes())["identity"]
    except (OSError, ValueError, TypeError, KeyError):
        return Audit(run_dir, "unknown", (), ("its identity can't be read",))
    return Audit(
        run_dir, _state(state, published), tuple(_differs(identity, today)), tuple(_damage(run_dir, published))
    )


def _state(state: Path, published: Mapping[str, str] | None) -> str:
    if not state.is_dir():
        return "copied without its state"
    log = state / "steps.log"
    records = read_log(log) if log.is_file() else []
    steps = f"{records[-1]['step']} steps" if records else "no step"
    if in_use(state / "lock"):
        return f"running, {steps} so far"
    return f"finished, {steps}" if published else f"unfinished, {steps}"


def _differs(identity: Mapping[str, Any], today: Mapping[str, Any]) -> list[str]:
    phrases = []
    codes = [*identity["earlier_package_sha256"], identity["package_sha256"]]
    if codes != [today["package_sha256"]]:
        phrases.append(
            f"other code (package {', then '.join(c[:12] for c in codes)}; today {today['package_sha256'][:12]})"
        )
    if today["config"] is None:
        phrases.append(f"arm {identity['arm']} is not in today's configuration")
    keys = tuple(key for key in today if key != "package_sha256" and today[key] is not None)
    return phrases + differences(identity, today, keys)


def _damage(run_dir: Path, published: Mapping[str, str] | None) -> list[str]:
    """Declared files that are gone or no longer have the digest they were published with."""
    phrases = []
    for name, digest in (published or {}).items():
        path = run_dir / name
        if not path.is_file():
            phrases.append(f"{name} is missing")
        elif sha256_file(path) != digest:
            phrases.append(f"{name} was changed after it was published")
    return phrases
