"""Command-line options that every program of `workflow/scripts/` shares."""

import argparse
import json
from typing import TypeVar

from score_centering.settings.errors import UserError
from score_centering.settings.load import DEFAULT_CONFIG, load_settings, parse
from score_centering.settings.stages import Stage

S = TypeVar("S", bound=Stage)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--settings`, `--configfile` and trailing `key=value` overrides to `parser`."""
    group = parser.add_argument_group("settings")
    group.add_argument("--settings", metavar="JSON", help="the stage's settings, as the workflow passes them")
    group.add_argument(
        "--configfile",
        action="append",
        metavar="FILE",
        default=[],
        help=f"preset laid over {DEFAULT_CONFIG}; may be given again, later ones win",
    )
    group.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over everything else")


def read(arguments: argparse.Namespace, stage: type[S], arm: str | None = None, smoke: bool = False) -> S:
    """The stage's settings: from `--settings` as it is, else from the configuration files and overrides."""
    if arguments.settings is None:
        files = [DEFAULT_CONFIG, *(file for file in arguments.configfile if file != DEFAULT_CONFIG)]
        return stage.of(load_settings(files, arguments.overrides, arm, smoke))
    if arguments.configfile or arguments.overrides:
        raise UserError("--settings holds every setting: leave --configfile and key=value out")
    try:
        content = json.loads(arguments.settings)
    except json.JSONDecodeError as error:
        raise UserError(f"--settings: not valid JSON: {error}") from None
    return parse(stage, content)
