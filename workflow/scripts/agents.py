"""Solve a gateway's tasks with the single-turn math agent, many side by side, until stopped.

By hand:  SC_KEY=… python workflow/scripts/agents.py --gateway http://127.0.0.1:8282
"""

import argparse

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import GatewayStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True, metavar="URL", help="the gateway's address")
    parser.add_argument("--at-once", type=int, default=256, metavar="N", help="tasks solved side by side")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, the launcher, ends")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.at_once < 1:
        raise UserError(f"--at-once {arguments.at_once}: must be at least 1")
    stage = cli.read(arguments, GatewayStage)

    import asyncio

    from score_centering.gateway import environment
    from score_centering.gateway.agent import work
    from score_centering.runs import die_with_parent

    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    asyncio.run(work(arguments.gateway, environment.key(), stage.prompt.instruction, arguments.at_once))


if __name__ == "__main__":
    run_main(main)
