"""Write report.html, one file that needs no network, from the finished runs, gates and manifests of one experiment."""

import argparse
from pathlib import Path

from score_centering.figures.experiment import read_experiment
from score_centering.figures.report import render
from score_centering.settings import cli, run_main
from score_centering.settings.stages import FiguresStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment-dir", type=Path, metavar="DIR", help="default: results/<experiment>")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the experiment's folder")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, FiguresStage)
    folder = arguments.experiment_dir or Path("results") / stage.experiment
    smoothing = stage.figures.smoothing_steps
    experiment = read_experiment(folder, stage.arms, stage.seeds, smoothing, stage.control, stage.labels)
    output = arguments.output or folder / "report.html"
    output.write_text(render(experiment, stage.descriptions, folder), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    run_main(main)
