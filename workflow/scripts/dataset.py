"""Prepare the dataset of one experiment: train.parquet, test.parquet and manifest.json from a pinned source."""

import argparse
from pathlib import Path

from score_centering.data import open_source, prepare, write_dataset
from score_centering.reward import Scorer
from score_centering.reward.extraction import reading_of
from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import DatasetStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the three files")
    parser.add_argument("--val-size", type=int, help="validation problems, instead of dataset.val_size")
    parser.add_argument("--seed", type=cli.seed, help="seed of the split, instead of dataset.seed")
    parser.add_argument("--workers", type=int, default=2, help="processes that check the answers (default: 2)")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    settings = cli.read(arguments, DatasetStage).dataset
    split = {
        "val_size": settings.val_size if arguments.val_size is None else arguments.val_size,
        "seed": settings.seed if arguments.seed is None else arguments.seed,
        "train_size": settings.train_size,
        "min_solve_rate": settings.min_solve_rate,
        "max_solve_rate": settings.max_solve_rate,
    }
    if split["val_size"] < 1:
        raise UserError(f"--val-size: {split['val_size']} must be at least 1")
    block = getattr(settings, settings.source).model_dump()
    source = open_source(settings.source, block, split["seed"], reading_of(settings.columns))
    with Scorer(workers=arguments.workers) as scorer:
        prepared = prepare(source, parsable=scorer.are_golds, **split)
    manifest = write_dataset(prepared, source, arguments.output_dir, split)
    for reason, count in manifest.dropped.items():
        print(f"dropped {count} of {manifest.rows_read} rows: {reason}")
    for name, file in manifest.files.items():
        print(f"{arguments.output_dir / name}: {file['rows']} problems")


if __name__ == "__main__":
    run_main(main)
