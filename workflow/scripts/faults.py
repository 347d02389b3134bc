"""What the precision gate's checks see of a KV cache that is damaged at known rates."""

import argparse
import json
from pathlib import Path

from score_centering.settings import cli, run_main
from score_centering.settings.stages import FaultCheckStage


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
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the parquet file")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, FaultCheckStage)

    from score_centering.figures.fault_study import check_table
    from score_centering.figures.scan import write_table
    from score_centering.validation.fault_check import check_faults

    rows = []
    for row in check_faults(stage, arguments.dataset_manifest, arguments.model_manifest, arguments.quantised_config):
        print(json.dumps(row), flush=True)
        rows.append(row)
    write_table(check_table(rows, stage.to_json()), arguments.output)


if __name__ == "__main__":
    run_main(main)
