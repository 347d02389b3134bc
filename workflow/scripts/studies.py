"""Tables and figures of the studies: drift, faults, sweep, stale. Reads parquet alone."""

import argparse
from pathlib import Path

import pyarrow.parquet as pq

from score_centering.figures.canvas import drawing, save
from score_centering.figures.drift_study import draw_drift, drift_table
from score_centering.figures.fault_study import draw_faults, fault_table
from score_centering.figures.scan import write_table
from score_centering.figures.stale_study import draw_stale, stale_table
from score_centering.figures.sweep_study import draw_sweep, sweep_table
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("drift-table", "drift", "faults", "sweep", "stale"))
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="drift-table: its runs; drift: the table; faults: checks",
    )
    parser.add_argument(
        "--runs", type=Path, nargs="+", metavar="DIR", help="faults, sweep, stale: …/<cell>/<arm>/seed<k>"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="STEM", help="STEM.png, .svg, .pdf, .parquet")
    arguments = parser.parse_args()
    stem = arguments.output
    if arguments.what == "drift-table":
        table = drift_table(arguments.measured)
    elif arguments.what == "drift":
        table = pq.read_table(arguments.measured[0])
    else:
        table = {"faults": fault_table, "sweep": sweep_table, "stale": stale_table}[arguments.what](arguments.runs)
    if arguments.what != "drift":
        write_table(table, stem.with_name(f"{stem.name}.parquet"))
    if arguments.what == "drift-table":
        return
    with drawing():
        if arguments.what == "drift":
            figure = draw_drift(table)
        elif arguments.what == "faults":
            figure = draw_faults(pq.read_table(arguments.measured[0]), table)
        else:
            figure = {"sweep": draw_sweep, "stale": draw_stale}[arguments.what](table)
        for path in save(figure, stem):
            print(path)


if __name__ == "__main__":
    run_main(main)
