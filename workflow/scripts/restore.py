"""Bring a finished run back: its state from the archive of its folder, and its published files.

By hand:  python workflow/scripts/restore.py results/tiny/runs/sc/seed0
Nothing is lost: the state that is there now is set aside in state/archive, and this program brings it back too.
"""

import argparse
from pathlib import Path

from score_centering.runs.folder import restore
from score_centering.settings import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="a run folder, such as results/tiny/runs/sc/seed0")
    parser.add_argument(
        "--archive", type=int, metavar="N", help="state/archive/<N>; default: the present or newest finished one"
    )
    arguments = parser.parse_args()
    print(restore(arguments.run_dir, arguments.archive))


if __name__ == "__main__":
    run_main(main)
