"""Compare two finished experiments: one table, overlaid figures, and the settings in which they differ.

By hand:  python workflow/scripts/compare.py results/a results/b
"""

import argparse
from pathlib import Path

from score_centering.figures.canvas import drawing, save
from score_centering.figures.compare import OVERLAYS, diff, document, overlay, table
from score_centering.figures.experiment import read_experiment
from score_centering.figures.series import WINDOW
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="DIR", help="such as results/a")
    parser.add_argument("second", type=Path, metavar="DIR", help="such as results/b")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: FIRST/comparisons/<name of SECOND>")
    parser.add_argument("--smoothing", type=int, default=WINDOW, metavar="STEPS", help="trailing mean of the curves")
    arguments = parser.parse_args()
    first, second = (
        read_experiment(folder, smoothing=arguments.smoothing) for folder in (arguments.first, arguments.second)
    )
    output = arguments.output_dir or arguments.first / "comparisons" / arguments.second.resolve().name
    print(table(first, second))
    print(diff(first, second))
    with drawing():
        for name, (column, label, log) in OVERLAYS.items():
            for path in save(overlay(first, second, column, label, log), output / name):
                print(path)
    (output / "comparison.md").write_text(document(first, second), encoding="utf-8")
    print(output / "comparison.md")


if __name__ == "__main__":
    run_main(main)
