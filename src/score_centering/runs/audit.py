"""Which runs were made by other code, settings or inputs than today's, and which declared files were changed since.

It only reads, and starts nothing: code edits retrain no run by themselves, so this is where they show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from score_centering.runs import archive
from score_centering.runs.folder import PRODUCTS
from score_centering.runs.identity import differences, installed, package_digest, read_identity
from score_centering.runs.lock import in_use
from score_centering.runs.log import read_log
from score_centering.settings import UserError
from score_centering.settings.inputs import sha256_file


@dataclass(frozen=True)
class Audit:
    """One run: its state in words, how it differs from today, and what is damaged."""

    run_dir: Path
    state: str
    differs: tuple[str, ...]
    damaged: tuple[str, ...]

    def line(self) -> str:
        phrases = "; ".join([*(f"DAMAGED: {phrase}" for phrase in self.damaged), *self.differs])
        return f"{self.run_dir}: {self.state}; {' '.join(phrases.split()) or 'made by the code and settings of today'}"


def audit(
    experiment: Path, configs: Mapping[str, Mapping[str, Any]], quantised_configs: Mapping[str, Path | None]
) -> list[Audit]:
    """Every run below `experiment`/runs, compared with today's code, installed versions and inputs.

    Args:
        configs: by arm, the settings that a run's identity holds.
        quantised_configs: by arm, the config.json that its rollouts are quantised by; None: BF16 rollouts.

    Raises:
        UserError: the folder holds no run.
    """
    marks = [path for name in ("state", "run.json") for path in (experiment / "runs").glob(f"*/seed*/{name}")]
    folders = sorted({path.parent for path in marks})
    if not folders:
        raise UserError(f"{experiment}: holds no run; give the folder of one experiment, such as results/tiny")
    code = {"package_sha256": package_digest(), "versions": installed()}
    manifests = {"dataset_manifest_sha256": "dataset/manifest.json", "model_manifest_sha256": "model/manifest.json"}
    shared = {key: experiment / name for key, name in manifests.items()}
    audits = []
    for folder in folders:
        arm = folder.parent.name
        inputs = _digests({**shared, "quantised_config_sha256": quantised_configs.get(arm)})
        audits.append(_audit_run(folder, {**code, **inputs, "config": configs.get(arm)}))
    return audits


def _digests(paths: Mapping[str, Path | None]) -> dict[str, str]:
    """The digests of today's inputs; those that are not there, or that an arm has not, are not compared."""
    return {key: sha256_file(path) for key, path in paths.items() if path is not None and path.is_file()}


def _audit_run(run_dir: Path, today: Mapping[str, Any]) -> Audit:
    state = run_dir / "state"
    try:
        digests = archive.read_digests(state)
        identity = (
            read_identity(state / "identity.json")
            if state.is_dir()
            else read_identity(run_dir / "run.json", "identity")
        )
    except UserError as error:
        return Audit(run_dir, "unknown", (), (str(error),))
    return Audit(run_dir, _state(state), tuple(_differs(identity, today)), tuple(_damage(run_dir, digests)))


def _state(state: Path) -> str:
    if not state.is_dir():
        return "copied without its state"
    log = state / "steps.log"
    records = read_log(log) if log.is_file() else []
    steps = f"{records[-1]['step']} steps" if records else "no step"
    if in_use(state / "lock"):
        return f"running, {steps} so far"
    return f"finished, {steps}" if (state / archive.PUBLISHED).is_file() else f"unfinished, {steps}"


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
    """Declared files that are gone or no longer have the digest they were published with. Beside an unfinished state
    they are those of the finished run before it, unless a workflow deleted them all to make them again."""
    phrases = []
    if not (run_dir / "state" / archive.PUBLISHED).is_file() and not any((run_dir / n).exists() for n in PRODUCTS):
        return []
    if unknown := set(published or {}) - set(PRODUCTS):
        phrases.append(f"state/PUBLISHED names what no run declares: {min(unknown)!r}")
    for name, digest in (published or {}).items():
        if name in unknown:
            continue
        path = run_dir / name
        if not path.is_file():
            phrases.append(f"{name} is missing")
        elif sha256_file(path) != digest:
            phrases.append(f"{name} was changed after it was published")
    return phrases
