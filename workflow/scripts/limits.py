"""Take measurements of one model as its limits of the precision gate: a preset that is laid over the others.

Of the gate.json of several seeds the limits are the range, widened by its own width; of one, its errors doubled.
"""

import argparse
from pathlib import Path

from score_centering.settings import run_main
from score_centering.validation.adopt import limits_of, preset, read_measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gates", type=Path, nargs="+", metavar="FILE", help="results/<experiment>/precision/gate.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the preset")
    arguments = parser.parse_args()
    model, measurements = read_measurements(arguments.gates)
    limits = limits_of(measurements)
    arguments.output.write_text(preset(model, limits, len(measurements)), encoding="utf-8")
    print(f"{arguments.output}: {len(limits)} limits of model {model}")


if __name__ == "__main__":
    run_main(main)
