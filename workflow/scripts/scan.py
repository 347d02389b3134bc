"""One table of any finished runs: the settings in which they differ, and how each run ended.

By hand:  python workflow/scripts/scan.py results/tiny results/other --output scan.parquet
"""

import argparse
from pathlib import Path

from score_centering.figures.scan import scan, write_table
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="run folders, or folders that hold some")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the parquet file")
    arguments = parser.parse_args()
    table = scan(arguments.folders)
    write_table(table, arguments.output)
    print(f"{arguments.output}: {table.num_rows} runs, {table.num_columns} columns")


if __name__ == "__main__":
    run_main(main)
