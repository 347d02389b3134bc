"""Follow every run of an experiment from its append-only log, until Ctrl-C. Starts and changes nothing.

By hand:  python workflow/scripts/watch.py results/tiny
On a terminal it shows a live table; elsewhere it prints a line for each new step.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from score_centering.runs.watch import changes, experiment_status, line, table
from score_centering.settings import UserError, run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment_dir", type=Path, metavar="DIR", help="such as results/tiny")
    parser.add_argument("--once", action="store_true", help="print where the runs stand and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between two looks")
    arguments = parser.parse_args()
    folder = arguments.experiment_dir
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of one experiment, such as results/tiny")
    console = Console()
    try:
        if console.is_terminal and not arguments.once:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(table(experiment_status(folder, time.time())), refresh=True)
                    time.sleep(arguments.interval)
        seen = []
        while True:
            now = experiment_status(folder, time.time())
            for status in changes(seen, now):
                print(line(status), flush=True)
            if arguments.once:
                if not now:
                    print(f"{folder}: no run has begun")
                return
            seen = now
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    run_main(main)
