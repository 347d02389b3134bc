"""Tables and figures of the studies: drift, faults, sweep. Reads parquet alone."""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.figures.canvas import drawing, save
from score_centering.figures.drift import draw_drift
from score_centering.figures.faults import draw_faults, fault_table
from score_centering.figures.scan import write_table
from score_centering.figures.sweep import heat_map, sweep_table
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=("drift", "faults", "sweep"))
    parser.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="drift: rows of its samplers; faults: what was checked"
    )
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR", help="faults, sweep: …/<cell>/<arm>/seed<k>")
    parser.add_argument("--output", type=Path, required=True, metavar="STEM", help="STEM.png, .svg, .pdf, .parquet")
    arguments = parser.parse_args()
    stem = arguments.output
    with drawing():
        if arguments.study == "drift":
            table = pa.concat_tables([pq.read_table(path) for path in arguments.measured])
            figure = draw_drift(table)
        elif arguments.study == "faults":
            table = fault_table(arguments.runs)
            figure = draw_faults(pq.read_table(arguments.measured[0]), table)
        else:
            table = sweep_table(arguments.runs)
            figure = heat_map(table)
        write_table(table, stem.with_name(f"{stem.name}.parquet"))
        for path in save(figure, stem):
            print(path)


if __name__ == "__main__":
    run_main(main)
