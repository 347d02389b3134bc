"""Prepare the quantised model of one number format, as llm-compressor writes it."""

import argparse
import os
from pathlib import Path

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import QuantizationStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-manifest", type=Path, required=True, help="model/manifest.json")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the checkpoint and its manifest.json")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, QuantizationStage)
    if stage.format is None:
        raise UserError("actor_rollout_ref.rollout.quantization is null: BF16 rollouts need no quantised model")

    # llm-compressor would quantise on a GPU with other roundings; the reference bytes are the CPU's.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    from transformers.utils import logging

    from score_centering.model.model_manifest import read_model_manifest, verified_folder
    from score_centering.model.quantised import prepare_quantised
    from score_centering.precision.registry import FORMATS, format_of

    logging.disable_progress_bar()
    folder = verified_folder(arguments.model_manifest)
    base = read_model_manifest(arguments.model_manifest)
    used = format_of(stage.format)
    manifest = prepare_quantised(folder, base, used, stage.quantization, arguments.output_dir)
    manifest.write(arguments.output_dir / "manifest.json")
    label = FORMATS[stage.format].label
    print(
        f"{arguments.output_dir / 'config.json'}: {len(manifest.quantised_layers)} layers in {label}, "
        f"{len(manifest.ignored_layers)} linear layers left in BF16"
    )


if __name__ == "__main__":
    run_main(main)
