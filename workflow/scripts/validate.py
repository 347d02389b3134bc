"""Measure what low-precision rollouts change, against the trainer's BF16 forward; succeeds whatever the numbers are."""

import argparse
import json
from pathlib import Path

from score_centering.settings import cli, run_main
from score_centering.settings.stages import ValidationStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset-manifest", type=Path, required=True, metavar="FILE", help="dataset/manifest.json")
    parser.add_argument("--model-manifest", type=Path, required=True, metavar="FILE", help="model/manifest.json")
    parser.add_argument(
        "--quantised-config",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="config.json of each quantised model that an arm's rollouts need",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="validation.json; its figures are written beside it"
    )
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, ValidationStage)

    from score_centering.figures.canvas import drawing, save
    from score_centering.figures.validation_page import page
    from score_centering.validation.stage import validate_precisions

    validation = validate_precisions(
        stage, arguments.dataset_manifest, arguments.model_manifest, arguments.quantised_config
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(validation, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with drawing():
        save(page(validation), arguments.output.with_suffix(""))
    for name, value in validation["numbers"].items():
        print(f"{name:50} {value if value is None else f'{value:.6g}'}")
    for note in validation["notes"]:
        print(f"note: {note}")


if __name__ == "__main__":
    run_main(main)
