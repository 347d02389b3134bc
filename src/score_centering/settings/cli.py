"""Command-line options that every program of `workflow/scripts/` shares."""

import argparse
import json
from typing import TypeVar

from score_centering.settings.dotted import deep_merge
from score_centering.settings.errors import UserError
from score_centering.settings.load import DEFAULT_CONFIG, load_settings, parse, parse_overrides
from score_centering.settings.model import Settings
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


def seed(text: str) -> int:
    """A seed on the command line.

    Raises:
        ArgumentTypeError: no whole number from 0 on.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 0 on")
    return int(text)


def read(arguments: argparse.Namespace, stage: type[S], arm: str | None = None, smoke: bool = False) -> S:
    """The stage's settings: from `--settings`, else from the configuration files; overrides are laid over either."""
    if arguments.settings is None:
        return stage.of(load_settings(_files(arguments), arguments.overrides, arm, smoke))
    if arguments.configfile:
        raise UserError("--settings holds every setting: leave --configfile out")
    try:
        content = json.loads(arguments.settings)
    except json.JSONDecodeError as error:
        raise UserError(f"--settings: not valid JSON: {error}") from None
    given = parse(stage, content).model_dump(mode="json")
    return parse(stage, deep_merge(given, parse_overrides(arguments.overrides)))


def read_arms(arguments: argparse.Namespace) -> tuple[Settings, dict[str, Settings]]:
    """The whole configuration, and the same resolved for each arm that it runs."""
    if arguments.settings is not None:
        raise UserError("--settings holds one stage, this program looks at all: use --configfile and key=value")
    files = _files(arguments)
    settings = load_settings(files, arguments.overrides)
    return settings, {arm: load_settings(files, arguments.overrides, arm) for arm in settings.run.arms}


def _files(arguments: argparse.Namespace) -> list[str]:
    return [DEFAULT_CONFIG, *(file for file in arguments.configfile if file != DEFAULT_CONFIG)]
