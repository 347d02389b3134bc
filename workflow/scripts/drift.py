"""Train without a learning signal, with or without centering, and record how far the weights drift."""

import argparse
from pathlib import Path

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import DriftStage
from score_centering.settings.studies import SAMPLERS, ways_to_center


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", required=True, choices=SAMPLERS, help="synced every step, or never")
    parser.add_argument("--centering", required=True, metavar="NAME", help="exact, none, or k<K> of drift.head_sizes")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--dataset-manifest", type=Path, required=True, metavar="FILE", help="dataset/manifest.json")
    parser.add_argument("--model-manifest", type=Path, required=True, metavar="FILE", help="model/manifest.json")
    parser.add_argument(
        "--quantised-config", type=Path, nargs="?", metavar="FILE", help="config.json of the quantised model, if any"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the parquet file; weights lie beside it"
    )
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, DriftStage)

    import pyarrow as pa
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from score_centering.data import read_split
    from score_centering.figures.drift_study import DRIFT
    from score_centering.figures.scan import write_table
    from score_centering.model.model_manifest import verified_folder
    from score_centering.training.drift_runs import drift_run
    from score_centering.training.task import Inputs

    inputs = Inputs(
        train=read_split(arguments.dataset_manifest, "train")[: stage.drift.steps * stage.drift.train_batch_size],
        validation=read_split(arguments.dataset_manifest, "test"),
        model_folder=verified_folder(arguments.model_manifest, stage.train.actor_rollout_ref.rollout.name),
        quantised_config=arguments.quantised_config,
    )
    vocab_size = AutoConfig.from_pretrained(inputs.model_folder, local_files_only=True).vocab_size
    allowed = ways_to_center(stage.drift.head_sizes)
    if arguments.centering not in allowed:
        raise UserError(f"--centering {arguments.centering!r}: allowed are {', '.join(allowed)}")
    rows, weights = drift_run(stage, arguments.sampler, arguments.centering, arguments.seed, inputs, vocab_size)
    table = pa.Table.from_pylist(rows, DRIFT).replace_schema_metadata({"settings": stage.to_json()})
    write_table(table, arguments.output)
    save_file(weights, arguments.output.with_suffix(".safetensors"))
    first, last = rows[0], rows[-1]
    print(
        f"{arguments.sampler}, {arguments.centering}, seed {arguments.seed}: moved {last['displacement']:.4f}, "
        f"reward {first['reward_sampled']:.3f} to {last['reward_sampled']:.3f}"
    )


if __name__ == "__main__":
    run_main(main)
