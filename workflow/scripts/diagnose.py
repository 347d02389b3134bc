"""What is wrong with this training? Reads the log of a finished or running one, of any framework, and says so.

By hand:  python workflow/scripts/diagnose.py results/tiny/runs/grpo/seed0
          python workflow/scripts/diagnose.py console.log --rollouts dumped/ --json

LOG is our run folder (or metrics.parquet); verl's file log (.jsonl) or console output; trainer_state.json of TRL, or a
folder that holds one; metrics.jsonl or console output of prime-rl; console output of SkyRL, slime and miles;
metrics.json of NeMo-RL; a W&B history exported as CSV or parquet; TensorBoard event files or their folder; any table
with a step. An experiment or a table of several runs gives one verdict each. docs/mismatch.md tells the rules.
"""

import argparse
import json
from pathlib import Path

from score_centering.diagnosis.columns import QUANTITIES
from score_centering.diagnosis.readers import Log, read
from score_centering.diagnosis.tokens import read_tokens
from score_centering.diagnosis.verdicts import CORRECTIONS, diagnose
from score_centering.diagnosis.wording import as_json, as_text, with_tokens
from score_centering.settings import UserError, run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="one run each")
    parser.add_argument(
        "--rollouts", type=Path, metavar="DIR", help="parquet or JSON lines with the log-probs of both sides"
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="QUANTITY=NAME",
        help=f"read a quantity from this column; quantities: {', '.join(QUANTITIES)}",
    )
    parser.add_argument(
        "--corrections",
        choices=CORRECTIONS,
        default="unknown",
        help="what the objective does; default: as the log tells",
    )
    parser.add_argument("--figure", type=Path, metavar="STEM", help="write STEM.png, .svg and .pdf: what changed first")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, a line each")
    arguments = parser.parse_args()
    overrides = dict(_override(text) for text in arguments.column)
    logs = [log for path in arguments.logs for log in read(path, overrides)]
    if len(logs) > 1 and (arguments.rollouts or arguments.figure):
        raise UserError(f"--rollouts and --figure take one run, not {len(logs)}")
    tokens = read_tokens(arguments.rollouts) if arguments.rollouts else None
    for log in logs:
        diagnosis = diagnose(log, arguments.corrections)
        if tokens is not None:
            diagnosis = with_tokens(diagnosis, tokens)
        print(json.dumps(as_json(log, diagnosis, tokens)) if arguments.json else as_text(log, diagnosis, tokens))
    if arguments.figure:
        draw(logs[0], arguments.figure, quiet=arguments.json)


def draw(log: Log, stem: Path, quiet: bool) -> None:
    from score_centering.diagnosis.timeline import timeline  # Matplotlib, only for those who want the figure
    from score_centering.figures.canvas import drawing, save

    with drawing():
        for path in save(timeline(log), stem):
            if not quiet:
                print(path)


def _override(text: str) -> tuple[str, str]:
    quantity, equals, column = text.partition("=")
    if not (quantity and equals and column):
        raise UserError(f"--column {text}: must be QUANTITY=NAME, such as k3_kl=my/kl")
    return quantity, column


if __name__ == "__main__":
    run_main(main)
