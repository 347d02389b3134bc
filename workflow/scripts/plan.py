"""Will it fit, and how long will it take? Memory and hours of every arm, before any GPU second is spent.

From the settings and the model's config.json alone: nothing is fetched, no weights are read, no GPU is needed.
By hand:  python workflow/scripts/plan.py --configfile config/b200.yaml --device h200
"""

import argparse
from pathlib import Path

from score_centering.settings import cli, run_main
from score_centering.settings.preflight import check_workflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=["b200", "h200", "h100", "cpu"], help="default: b200, or cpu by the settings"
    )
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="config.json, where the cache has none")
    parser.add_argument("--prompt-tokens", type=int, help="expected tokens of a prompt; default: half the limit")
    parser.add_argument("--response-tokens", type=int, help="expected tokens of a response; default: half the limit")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    settings, arms = cli.read_arms(arguments)
    if arguments.model_config is None:
        check_workflow(settings)
    device = arguments.device or ("cpu" if settings.runtime.device == "cpu" else "b200")

    from score_centering.planning.plan import report  # torch, only once the settings are good

    data = settings.data
    tokens = (
        arguments.prompt_tokens or -(-data.max_prompt_length // 2),
        arguments.response_tokens or -(-data.max_response_length // 2),
    )
    for line in report(settings, arms, arguments.model_config, device, tokens):
        print(line, flush=True)


if __name__ == "__main__":
    run_main(main)
