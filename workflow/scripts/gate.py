"""Hold measured numbers against the configured limits; exit with 3 and one line a broken limit, else with 0."""

import argparse
import json
import sys
from pathlib import Path

from score_centering.settings import run_main
from score_centering.settings.cli import add_arguments, read
from score_centering.settings.inputs import read_json
from score_centering.settings.stages import PrecisionGateStage, SmokeGateStage
from score_centering.validation.gate import (
    FAILED_EXIT_CODE,
    judge,
    precision_limits,
    precision_numbers,
    smoke_numbers,
)

GATES = {"precision": (PrecisionGateStage, precision_numbers), "smoke": (SmokeGateStage, smoke_numbers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gate", choices=sorted(GATES))
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="validation.json or a smoke run.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="gate.json")
    add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage, numbers_of = GATES[arguments.gate]
    settings = read(arguments, stage).model_dump()
    limits = settings["limits"]
    measured = read_json(arguments.input)
    numbers = numbers_of(measured)
    verdict = judge(numbers, precision_limits(measured, limits) if arguments.gate == "precision" else limits)
    if settings.get("model") is not None:
        verdict |= {"model": settings["model"], "measured": settings["measured"]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(verdict, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(
        "\n".join(
            f"{name:50} {value if value is None else f'{value:.6g}'}" for name, value in verdict["numbers"].items()
        )
    )
    if not verdict.get("measured", True):
        print(f"no limits were measured on model {verdict['model']}: judged was what must hold for any")
        print(f"to adopt this measurement: python workflow/scripts/limits.py {arguments.output} --output limits.yaml")
    for line in verdict["failures"]:
        print(f"error: {arguments.gate} gate: {line}", file=sys.stderr)
    return 0 if verdict["passed"] else FAILED_EXIT_CODE


if __name__ == "__main__":
    run_main(main)
