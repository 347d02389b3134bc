"""Prepare the base model: fetch or build it, warm-start it, and write its manifest."""

import argparse
from pathlib import Path

from score_centering.settings import cli, run_main
from score_centering.settings.stages import ModelStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset-manifest", type=Path, required=True, help="dataset/manifest.json")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the base weights")
    parser.add_argument("--manifest", type=Path, required=True, help="model manifest to write, beside the folder")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, ModelStage)

    from score_centering.model.prepare_model import (
        prepare_model,  # torch and transformers, only once the settings are good
    )

    def report(step: int, loss: float, reward: float) -> None:
        print(f"warm start: step {step}  loss {loss:.4f}  sampled reward {reward:.3f}", flush=True)

    manifest = prepare_model(stage, arguments.dataset_manifest, arguments.output_dir, report)
    manifest.write(arguments.manifest)
    print(f"{arguments.manifest}: {manifest.parameters:,} parameters from {manifest.source['kind']}")


if __name__ == "__main__":
    run_main(main)
