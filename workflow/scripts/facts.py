"""Write docs/default-run.json, the numbers of the default run that README tells, and list what README must say.

By hand:  python workflow/scripts/facts.py results/tiny
Exit code 1 when README does not say all of it yet.
"""

import argparse
import json
from pathlib import Path

from score_centering.figures.facts import collect, phrases
from score_centering.settings import run_main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, metavar="DIR", help="results of the default configuration")
    parser.add_argument("--output", type=Path, default=Path("docs/default-run.json"), metavar="FILE")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), metavar="FILE")
    arguments = parser.parse_args()
    facts = collect(arguments.experiment)
    arguments.output.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    readme = " ".join(arguments.readme.read_text(encoding="utf-8").split())
    missing = [phrase for phrase in phrases(facts) if phrase not in readme]
    for phrase in phrases(facts):
        print(f"{'MISSING' if phrase in missing else 'told'}: {phrase}")
    return int(bool(missing))


if __name__ == "__main__":
    run_main(main)
