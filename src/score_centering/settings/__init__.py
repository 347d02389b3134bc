"""The configuration: typed, strict, and cut into what each stage depends on. Imports no torch."""

from score_centering.settings.errors import UserError, run_main
from score_centering.settings.load import DEFAULT_CONFIG, interpolate, load_settings, resolve, validate
from score_centering.settings.model import Settings
from score_centering.settings.stages import STAGES, Stage, stage_json

__all__ = [
    "DEFAULT_CONFIG",
    "STAGES",
    "Settings",
    "Stage",
    "UserError",
    "interpolate",
    "load_settings",
    "resolve",
    "run_main",
    "stage_json",
    "validate",
]
