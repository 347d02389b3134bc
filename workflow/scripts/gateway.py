"""Put a recording gateway in front of an OpenAI-compatible server, so that agents' chat completions become rollouts.

By hand:  SC_PORT=8282 SC_KEY=… python workflow/scripts/gateway.py --upstream http://127.0.0.1:8000 --baseline sc
Sampling comes from the training configuration whatever the agents ask for; docs/gateway.md tells more.
"""

import argparse

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import GatewayStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, metavar="URL", help="the server's address, without /v1")
    parser.add_argument("--baseline", metavar="ARM", help="an arm of the configuration whose settings apply")
    parser.add_argument("--smoke", action="store_true", help="with the settings of a smoke run")
    parser.add_argument(
        "--model", metavar="NAME", help="what the upstream calls its model; default: the configured one"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, at port SC_PORT (default 8282)")
    limits = parser.add_argument_group("limits; what is over one is refused")
    limits.add_argument("--max-requests", type=int, default=2048, metavar="N", help="at the same time")
    limits.add_argument("--max-body-bytes", type=int, default=4 * 2**20, metavar="N", help="of one request")
    limits.add_argument("--max-rollouts", type=int, default=65_536, metavar="N", help="begun and not collected")
    limits.add_argument("--max-record-bytes", type=int, default=2 * 2**30, metavar="N", help="of records not collected")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, the launcher, ends")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    for name in ("max_requests", "max_body_bytes", "max_rollouts", "max_record_bytes"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    if not arguments.upstream.startswith(("http://", "https://")):
        raise UserError(f"--upstream {arguments.upstream}: must be a URL such as http://127.0.0.1:8000")
    stage = cli.read(arguments, GatewayStage, arguments.baseline, arguments.smoke)
    _serve(arguments, stage)


def _serve(arguments: argparse.Namespace, stage: GatewayStage) -> None:
    from score_centering.gateway import environment
    from score_centering.gateway.app import gateway_app
    from score_centering.gateway.policy import Policy
    from score_centering.gateway.running import listen, uvicorn_server
    from score_centering.gateway.store import Limits
    from score_centering.gateway.upstream import Upstream
    from score_centering.runs import die_with_parent

    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    key, port = environment.key(), environment.port()
    upstream = Upstream(arguments.upstream, key, environment.upstream_timeout_seconds())
    limits = Limits(
        requests=arguments.max_requests,
        body_bytes=arguments.max_body_bytes,
        rollouts=arguments.max_rollouts,
        record_bytes=arguments.max_record_bytes,
    )
    app = gateway_app(Policy.of(stage, arguments.model or stage.model_name), upstream, key, limits)
    listening = listen(arguments.host, port)
    print(f"gateway: http://{arguments.host}:{port} in front of {arguments.upstream}", flush=True)
    uvicorn_server(app).run(sockets=[listening])


if __name__ == "__main__":
    run_main(main)
