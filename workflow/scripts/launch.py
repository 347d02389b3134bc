"""Train one arm by hand with every rollout an agent's chat completion: gateway, agents and trainer on one GPU or CPU.

By hand:  python workflow/scripts/launch.py --baseline sc --smoke trainer.total_training_steps=5
The run lies in results/<experiment>/by-hand/, a folder of its own for each arm, seed and settings. The log folder
(SC_LOG_DIR) keeps the resolved configuration and one log a process. Ctrl-C or SIGTERM lets the trainer
write a checkpoint; a second one ends everything at once. When any process ends, so do the others.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import yaml

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.stages import GatewayStage, TrainStage

SCRIPTS = Path(__file__).parent
CHECKPOINT_SECONDS = 300.0  # for a trainer that was asked to stop: the rest of its step
START_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, metavar="ARM", help="an arm of the configuration")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps, no checkpoint")
    parser.add_argument("--run-dir", type=Path, help="default: results/<experiment>/by-hand/…")
    parser.add_argument("--agents", type=int, default=1, metavar="N", help="agent processes")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.agents < 1:
        raise UserError(f"--agents {arguments.agents}: must be at least 1")
    arguments.overrides.append("actor_rollout_ref.rollout.transport=gateway")
    stage = cli.read(arguments, TrainStage, arguments.baseline, arguments.smoke)
    if stage.trainer.name != "local":
        raise UserError(f"trainer.name = {stage.trainer.name!r}: launch.py starts the local trainer")
    gateway = cli.read(arguments, GatewayStage, arguments.baseline, arguments.smoke)

    from score_centering.gateway import environment
    from score_centering.runs.places import by_hand_folder

    environment.key()
    environment.upstream_timeout_seconds()
    if _answers(environment.port()):
        raise UserError(f"SC_PORT = {environment.port()}: this port is in use")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    default = Path(tempfile.gettempdir()) / f"score-centering-{stamp}-{os.getpid()}"
    folder = Path(os.environ.get("SC_LOG_DIR") or default)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs: {folder}", flush=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(stage.model_dump(mode="json"), sort_keys=False), "utf-8")
    results = Path("results") / stage.experiment
    default_run = by_hand_folder(results, arguments.baseline, arguments.seed, stage.identity(), arguments.smoke)
    run_dir = arguments.run_dir or default_run
    print(f"run folder: {run_dir}", flush=True)
    return _run(arguments, stage, gateway, folder, environment.port(), run_dir)


def _run(
    arguments: argparse.Namespace, stage: TrainStage, gateway: GatewayStage, folder: Path, port: int, run_dir: Path
) -> int:
    """Start everything and stay until the trainer ends; the exit code."""
    from score_centering.gateway.processes import Follower, Programs, StopSignals

    url, engine_port, parent = f"http://127.0.0.1:{port}", _free_port(), str(os.getpid())
    without_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    with StopSignals() as signals, Programs(folder) as programs:

        def start(name: str, script: str, settings: str, *options: str, environment: dict[str, str] | None = None):
            command = [sys.executable, str(SCRIPTS / script), *options, "--parent", parent, "--settings", settings]
            programs.start(name, command, environment)

        upstream = ("--upstream", f"http://127.0.0.1:{engine_port}", "--model", stage.experiment)
        start("gateway", "gateway.py", gateway.to_json(), *upstream, environment=without_gpu)
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port) and not programs.ended() and not signals.count:
            if time.monotonic() > deadline:
                raise UserError(f"the gateway does not answer on port {port}; see {programs.log('gateway')}")
            time.sleep(0.05)
        agents = [f"agents-{number}" for number in range(arguments.agents)] if not programs.ended() else []
        for name in agents:
            start(name, "agents.py", gateway.to_json(), "--gateway", url, environment=without_gpu)
        options = ["--baseline", arguments.baseline, "--seed", str(arguments.seed), "--gateway", url]
        options += ["--engine-port", str(engine_port), *(["--smoke"] if arguments.smoke else [])]
        options += ["--run-dir", str(run_dir)]
        start("trainer", "train.py", stage.to_json(), *options)
        follower, asked = Follower(programs.log("trainer")), 0.0
        while not (ended := programs.ended()):
            follower.copy()
            if signals.count and not asked:
                asked = time.monotonic()
                programs.terminate("trainer")
            if signals.count > 1 or (asked and time.monotonic() > asked + CHECKPOINT_SECONDS):
                programs.stop(["trainer"], grace_seconds=0)
            time.sleep(0.05)
        if "trainer" not in ended:  # another one crashed: the trainer cannot finish its step
            programs.stop(["trainer"], grace_seconds=10)
        follower.copy()
    if "trainer" in ended:
        return ended["trainer"] if ended["trainer"] >= 0 else 128 - ended["trainer"]
    for name, code in ended.items():
        print(f"error: {name} ended with exit code {code}; see {programs.log(name)}", file=sys.stderr)
    return 1


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    run_main(main)
