"""Draws the figures and writes the summary tables of one experiment, from its parquet files alone."""

import argparse
from pathlib import Path

from score_centering.figures.canvas import drawing, save
from score_centering.figures.experiment import read_experiment
from score_centering.figures.plots import FIGURES
from score_centering.figures.summary import summarise, write_summary
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment-dir", type=Path, required=True, metavar="DIR", help="such as results/tiny")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: the experiment's folder")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="default: every arm below DIR/runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="K", help="default: every seed of an arm")
    arguments = parser.parse_args()

    experiment = read_experiment(arguments.experiment_dir, arguments.arms, arguments.seeds)
    output = arguments.output_dir or arguments.experiment_dir
    with drawing():
        for name, draw in FIGURES.items():
            for path in save(draw(experiment), output / "figures" / name):
                print(path)
    for path in write_summary(summarise(experiment), output):
        print(path)


if __name__ == "__main__":
    run_main(main)
