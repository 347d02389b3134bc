"""Where a run started by hand belongs: not among files that the workflow declares, unless it is the workflow's run."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from score_centering.runs.identity import differences, json_digest
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json


def by_hand_folder(results: Path, arm: str, seed: int, shaping: Mapping[str, Any], smoke: bool) -> Path:
    """A folder of its own for each arm, seed and `shaping`, everything that shapes the run: the same command comes back
    to it."""
    kind = "-smoke" if smoke else ""
    return results / "by-hand" / f"{arm}-seed{seed}{kind}-{json_digest(shaping)[:8]}"


def declared_folder(results: Path, arm: str, seed: int, shaping: Mapping[str, Any]) -> Path:
    """The folder of the workflow's run of `arm` and `seed`.

    Raises:
        UserError: `shaping` is not what the workflow would train there, by the settings that it left.
    """
    folder, settings = results / "runs" / arm / f"seed{seed}", results / "settings" / f"{arm}.json"
    if settings.is_file():
        theirs = read_json(settings)
        theirs.get("trainer", {}).pop("logger", None)
        if differing := differences({"config": theirs}, {"config": dict(shaping)}, ("config",)):
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            other = by_hand_folder(results, arm, seed, shaping, smoke=False)
            raise UserError(
                f"{folder}: belongs to the workflow, whose settings are others ({'; '.join(differing[:3])}{more}); "
                f"name another folder for this run, such as --run-dir {shlex.quote(str(other))}"
            )
    return folder
