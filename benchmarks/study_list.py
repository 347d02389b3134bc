"""The runs of a study as a list for side_by_side.sh: a line a run, with what differs from its arm's own settings.

usage: python benchmarks/study_list.py STUDY [--configfile FILE ...] [--models] [key=value ...] >LIST
--models prints the targets of Snakemake that make the models which the runs start from, in the place of the runs. Each
run goes to <cell>/<arm>/seed<k> below side_by_side.sh's folder, as in the study's own.
"""

import argparse
import json
import sys
from pathlib import Path

from score_centering.settings import UserError, cli, run_main
from score_centering.settings.dotted import by_dotted_key, deep_merge
from score_centering.settings.load import DEFAULT_CONFIG, interpolate, parse_overrides, read_yaml, resolve
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import STUDIES, cell_stage, cells, model_folder


def words(own: TrainStage, wanted: TrainStage) -> list[str]:
    """`key=value` words that make `wanted` of the arm's own settings.

    Raises:
        UserError: a value holds a space, which a word of the list can't.
    """
    before, after = (by_dotted_key(stage.model_dump(mode="json")) for stage in (own, wanted))
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    if own.perturbation is not None and wanted.perturbation is None:
        changed["perturbation"] = None
    found = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in changed.items()]
    for word in found:
        if " " in word:
            raise UserError(f"study list: {word}: a value with a space fits no list")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--models", action="store_true", help="targets of the models, not the runs")
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    config = parse_overrides([])
    for path in (DEFAULT_CONFIG, *arguments.configfile):
        config = deep_merge(config, read_yaml(path))
    config = interpolate(deep_merge(config, parse_overrides(arguments.overrides)))
    settings = resolve(config)
    grid, results = getattr(settings, arguments.study), f"results/{settings.experiment}"
    given = [f"--configfile {path}" for path in arguments.configfile] + arguments.overrides
    own = {arm: TrainStage.of(resolve(config, arm=arm)) for arm in grid.arms}
    targets: dict[str, None] = {}
    for cell, chosen in cells(settings, arguments.study).items():
        folder = model_folder(results, chosen.entropy)
        for arm in grid.arms:
            stage = cell_stage(config, settings, arguments.study, cell, arm)
            quantised = stage.quantised_config(Path(folder))
            targets |= dict.fromkeys([f"{folder}/model/manifest.json", *([str(quantised)] if quantised else [])])
            run = [*given, *words(own[arm], stage)]
            if chosen.entropy is not None:
                run += [f"--model-manifest {folder}/model/manifest.json"]
                run += [f"--quantised-config {quantised}"] if quantised else []
            for seed in () if arguments.models else grid.seeds:
                sys.stdout.write(" ".join([f"{cell}/{arm}/seed{seed}", arm, str(seed), *run]) + "\n")
    if arguments.models:
        sys.stdout.write("\n".join(targets) + "\n")


if __name__ == "__main__":
    run_main(main)
