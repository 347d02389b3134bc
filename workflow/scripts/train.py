"""Train one arm with one seed, or smoke-test it: generate, score, update, and log every step.

By hand:  python workflow/scripts/train.py --baseline sc --smoke actor_rollout_ref.actor.optim.lr=1e-4
Inputs and outputs default to results/<experiment>/: a smoke run to by-hand/, a run with the workflow's own settings to
its folder there, any other needs --run-dir. --train-file and --val-file take a prepared split, or any parquet or JSONL
file with the columns that dataset.columns names. Stopped by Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 it writes a checkpoint
and exits with code 75; the same command goes on from there.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.dataset_blocks import Columns
from score_centering.settings.stages import DatasetStage, TrainStage

if TYPE_CHECKING:
    from score_centering.data import Problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, metavar="ARM", help="an arm of the configuration")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps, no checkpoint; writes run.json only")
    parser.add_argument("--dataset-manifest", type=Path, help="default: results/<experiment>/dataset/manifest.json")
    parser.add_argument("--train-file", type=Path, help="problems instead of the manifest's training split")
    parser.add_argument("--val-file", type=Path, help="problems instead of the manifest's test split")
    parser.add_argument("--model-manifest", type=Path, help="default: results/<experiment>/model/manifest.json")
    parser.add_argument(
        "--quantised-config",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="default: results/<experiment>/model/…/config.json of the rollouts' number format",
    )
    parser.add_argument("--run-dir", type=Path, help="default: results/<experiment>/{runs/ARM/seedK, by-hand/…}")
    parser.add_argument("--afresh", action="store_true", help="train a finished run anew; its old state is archived")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and start nothing")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, the workflow's, ends")
    group = parser.add_argument_group("a gateway and agents in processes of their own, as launch.py starts them")
    group.add_argument("--gateway", metavar="URL", help="the gateway's address; needs rollout.transport=gateway")
    group.add_argument("--engine-port", type=int, metavar="PORT", help="where it expects this process's engine")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage = cli.read(arguments, TrainStage, arguments.baseline, arguments.smoke)

    from score_centering.training.arm import arm_objective  # torch, only once the settings are good

    arm_objective(stage, arguments.baseline)
    if arguments.print_config:
        print(_resolved(arguments, stage), end="")
        return
    _train(arguments, stage)


def _resolved(arguments: argparse.Namespace, stage: TrainStage) -> str:
    """The settings, or what verl makes of them: its whole configuration."""
    if stage.trainer.name == "local":
        return yaml.safe_dump(stage.model_dump(mode="json"), sort_keys=False)
    from omegaconf import OmegaConf

    from score_centering.training.verl.driver.verl_config import verl_config

    results = Path("results") / stage.experiment
    quantised = stage.quantised_config(results)
    config = verl_config(
        stage,
        arguments.baseline,
        arguments.seed,
        (arguments.model_manifest or results / "model/manifest.json").parent / "base",
        quantised and (arguments.quantised_config or quantised),
    )
    return OmegaConf.to_yaml(config, sort_keys=True)


def _train(arguments: argparse.Namespace, stage: TrainStage) -> None:
    if arguments.parent is not None:
        from score_centering.runs import die_with_parent

        die_with_parent(arguments.parent)
    from score_centering.training.loggers import check

    check(stage.trainer.logger, arguments.smoke)
    results = Path("results") / stage.experiment
    dataset = arguments.dataset_manifest or results / "dataset/manifest.json"
    model = arguments.model_manifest or results / "model/manifest.json"
    quantised = stage.quantised_config(results)

    from score_centering.data import read_split
    from score_centering.model.model_manifest import verified_folder
    from score_centering.runs import PRODUCTS, finished_again, make_identity, open_run
    from score_centering.settings.inputs import sha256_file
    from score_centering.training.device import device_name, gpu_faults, lease
    from score_centering.training.task import Inputs

    if stage.trainer.name == "verl":
        from score_centering.training.verl.driver.verl_trainer import train_with_verl as train
    else:
        from score_centering.training.local import train_locally as train

    given = {"train_file": arguments.train_file, "val_file": arguments.val_file}
    columns, seed = _reading(arguments) if any(given.values()) else (Columns(), 0)
    inputs = Inputs(
        train=_problems(arguments.train_file, columns, seed) if arguments.train_file else read_split(dataset, "train"),
        validation=_problems(arguments.val_file, columns, seed) if arguments.val_file else read_split(dataset, "test"),
        model_folder=verified_folder(model, stage.actor_rollout_ref.rollout.name),
        quantised_config=quantised and (arguments.quantised_config or quantised),
    )
    files: dict[str, Any] = {name: sha256_file(path) for name, path in given.items() if path is not None}
    if columns != Columns():
        files["columns"] = columns.model_dump(mode="json")
    run_dir = arguments.run_dir or _default_folder(arguments, results, stage.identity() | files)
    identity = make_identity(
        stage.experiment,
        arguments.baseline,
        arguments.seed,
        stage.identity() | files,
        device_name(stage.runtime.device),
        stage.trainer.revision,
        None if arguments.train_file and arguments.val_file else dataset,
        model,
        inputs.quantised_config,
    )
    afresh = arguments.afresh or arguments.smoke
    if not afresh and finished_again(run_dir, identity):
        return
    publish = ["run.json"] if arguments.smoke else PRODUCTS
    of_this_node = stage.trainer.name == "verl" and "RAY_ADDRESS" not in os.environ
    gpus = stage.trainer.n_gpus_per_node if of_this_node else 1
    with gpu_faults(), lease(stage.runtime.device, gpus), open_run(run_dir, identity, publish, afresh) as run:
        train(run, stage, arguments.baseline, arguments.seed, inputs, **_gateway(arguments, stage))


def _reading(arguments: argparse.Namespace) -> tuple[Columns, int]:
    """How a file of one's own is read: its columns, and the seed of its order."""
    if arguments.settings is not None:  # they hold no dataset block
        return Columns(), 0
    dataset = cli.read(arguments, DatasetStage).dataset
    return dataset.columns, dataset.seed


def _problems(path: Path, columns: Columns, seed: int) -> "list[Problem]":
    """The problems of a file of one's own; what is dropped of it is told."""
    from score_centering.data import read_problems
    from score_centering.reward import Scorer
    from score_centering.reward.extraction import reading_of

    with Scorer() as scorer:
        problems, dropped = read_problems(path, reading_of(columns), seed=seed, parsable=scorer.are_golds)
    for reason, count in dropped.items():
        print(f"{path}: dropped {count} rows: {reason}", file=sys.stderr)
    return problems


def _default_folder(arguments: argparse.Namespace, results: Path, shaping: dict[str, Any]) -> Path:
    from score_centering.runs.places import by_hand_folder, declared_folder

    if not arguments.smoke:
        return declared_folder(results, arguments.baseline, arguments.seed, shaping)
    folder = by_hand_folder(results, arguments.baseline, arguments.seed, shaping, smoke=True)
    print(f"run folder: {folder}", flush=True)
    return folder


def _gateway(arguments: argparse.Namespace, stage: TrainStage) -> dict[str, Any]:
    """The gateway of the command line, for the local trainer."""
    if arguments.gateway is None and arguments.engine_port is None:
        return {}
    if stage.trainer.name != "local" or arguments.gateway is None or arguments.engine_port is None:
        raise UserError("--gateway and --engine-port come together, and with trainer.name local")
    from score_centering.training.transport import ExternalGateway

    return {"gateway": ExternalGateway(arguments.gateway, arguments.engine_port)}


if __name__ == "__main__":
    run_main(main)
