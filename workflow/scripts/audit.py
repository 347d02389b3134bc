"""List the runs of an experiment that were made by other code, settings or inputs than today's.

By hand:  python workflow/scripts/audit.py results/tiny
Starts and changes nothing. Exit code 1 when a published file is missing or was changed, else 0.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from score_centering.runs.audit import audit
from score_centering.settings import DEFAULT_CONFIG, UserError, load_settings, run_main
from score_centering.settings.load import parse
from score_centering.settings.stages import TrainStage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, help="the folder of one experiment, such as results/tiny")
    parser.add_argument("--settings", metavar="JSON", help="each arm's settings of today, as the workflow passes them")
    parser.add_argument(
        "--configfile", action="append", metavar="FILE", default=[], help=f"preset laid over {DEFAULT_CONFIG}"
    )
    arguments = parser.parse_args()
    if arguments.settings:
        stages = {arm: parse(TrainStage, content) for arm, content in _mapping(arguments.settings).items()}
    else:
        files = [DEFAULT_CONFIG, *(file for file in arguments.configfile if file != DEFAULT_CONFIG)]
        stages = {arm: TrainStage.of(load_settings(files, arm=arm)) for arm in load_settings(files).arms}
    configs = {arm: stage.identity() for arm, stage in stages.items()}
    quantised_configs = {arm: stage.quantised_config(arguments.experiment) for arm, stage in stages.items()}
    found = audit(arguments.experiment, configs, quantised_configs)
    for run in found:
        print(run.line())
    other = sum(bool(run.differs) for run in found)
    damaged = sum(bool(run.damaged) for run in found)
    print(f"{len(found)} runs: {other} made by other code, settings or inputs than today's, {damaged} damaged")
    return int(damaged > 0)


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--settings: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError("--settings: must map each arm to its settings")
    return content


if __name__ == "__main__":
    run_main(main)
