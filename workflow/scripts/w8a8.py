"""Prepare the W8A8 model: INT8 weights per output channel, dynamic per-token INT8 activations."""

import argparse
import os
from pathlib import Path

from score_centering.settings import cli, run_main
from score_centering.settings.stages import QuantizationStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-manifest", type=Path, required=True, help="model/manifest.json")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the checkpoint and its manifest.json")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, QuantizationStage)

    # llm-compressor would quantise on a GPU with other roundings; the reference bytes are the CPU's.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    from transformers.utils import logging

    from score_centering.model.model_manifest import read_model_manifest, verified_folder
    from score_centering.model.w8a8 import prepare_w8a8

    logging.disable_progress_bar()
    folder = verified_folder(arguments.model_manifest)
    base = read_model_manifest(arguments.model_manifest)
    manifest = prepare_w8a8(folder, base, stage.quantization, arguments.output_dir)
    manifest.write(arguments.output_dir / "manifest.json")
    print(
        f"{arguments.output_dir / 'config.json'}: {len(manifest.quantised_layers)} layers in INT8, "
        f"{len(manifest.ignored_layers)} linear layers left in BF16"
    )


if __name__ == "__main__":
    run_main(main)
