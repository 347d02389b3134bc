"""Draw the figures and write the summary tables of one experiment, from its parquet files alone.

By hand:  python workflow/scripts/figures.py run.arms=[sc,grpo]
"""

import argparse
from pathlib import Path

from score_centering.figures.canvas import drawing, save
from score_centering.figures.experiment import read_experiment
from score_centering.figures.plots import FIGURES
from score_centering.figures.summary import summarise, write_summary
from score_centering.settings import cli, run_main
from score_centering.settings.stages import FiguresStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment-dir", type=Path, metavar="DIR", help="default: results/<experiment>")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: the experiment's folder")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, FiguresStage)
    folder = arguments.experiment_dir or Path("results") / stage.experiment
    output = arguments.output_dir or folder

    smoothing = stage.figures.smoothing_steps
    experiment = read_experiment(folder, stage.arms, stage.seeds, smoothing, stage.control, stage.labels)
    with drawing():
        for name, draw in FIGURES.items():
            for path in save(draw(experiment), output / "figures" / name):
                print(path)
    for path in write_summary(summarise(experiment), output, stage.labels):
        print(path)


if __name__ == "__main__":
    run_main(main)
