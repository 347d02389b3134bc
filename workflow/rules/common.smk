"""The settings of each stage, and the names that the configuration gives to arms and seeds."""

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

from score_centering.precision.registry import FORMATS
from score_centering.settings.preflight import check_machine, check_workflow
from score_centering.settings import UserError, interpolate, resolve, stage_json
from score_centering.settings.load import with_dotted_keys
from score_centering.settings.stages import QuantizationStage, TrainStage, quantised_config
from score_centering.settings.studies import (
    SAMPLERS,
    STUDIES,
    cell_stage,
    cells,
    entropy_model_stage,
    model_folder,
    ways_to_center,
)


@cache
def interpolated():
    """The configuration without references to environment variables and other keys."""
    return interpolate(with_dotted_keys(config))


@cache
def resolved(arm=None, smoke=False):
    """Settings of one arm, or of no arm in particular; a fault in the configuration ends Snakemake with its line."""
    try:
        settings = resolve(interpolated(), arm=arm, smoke=smoke)
        check_workflow(settings)
        return settings
    except UserError as error:
        sys.exit(f"error: {error}")


def on_this_machine():
    """End Snakemake, before its first job, with the line that says what this machine lacks."""
    try:
        for settings in [SETTINGS, *map(resolved, SETTINGS.run.arms)]:
            check_machine(settings)
    except UserError as error:
        sys.exit(f"error: {error}")


def prepend(variable, folder):
    """Put `folder` first in an environment variable that lists folders."""
    os.environ[variable] = os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))


def afresh(rule, files):
    """The option that trains a finished run anew, for a job of `rule` that -R, -f or -F forces. A job on a cluster is
    always forced, so there a run whose files are gone trains again."""
    dag = workflow.dag_settings
    named = dag.forcerun | (dag.targets if dag.forcetargets else frozenset())
    forced = workflow.remote_exec or dag.forceall or rule in named or not named.isdisjoint(files)
    return "--afresh" if forced else ""


def quantised(*settings, results=None):
    """The config.json of each quantised model that the rollouts of these settings need; BF16 rollouts need none.
    results: where the model lies, if not in the experiment's folder."""
    paths = [quantised_config(each.actor_rollout_ref.rollout, Path(results or RESULTS)) for each in settings]
    return sorted({str(path) for path in paths if path})


@cache
def study_cell(study, cell, arm):
    """Settings of the runs of one cell and arm of a study."""
    return cell_stage(interpolated(), SETTINGS, study, cell, arm)


def study_stage(wildcards):
    """Settings of one run of a study."""
    return study_cell(wildcards.study, wildcards.cell, wildcards.arm)


def study_results(wildcards):
    """The folder below which the model that a study's run starts from lies."""
    return model_folder(RESULTS, CELLS[wildcards.study][wildcards.cell].entropy)


def study_files(study, name):
    """The file `name` of each run of a study, cell by cell, then by arm and seed."""
    grid = getattr(SETTINGS, study)
    pattern = f"<results>/{study}/runs/{{cell}}/{{arm}}/seed{{seed}}/{name}"
    return expand(pattern, cell=CELLS[study], arm=grid.arms, seed=grid.seeds)


def drift_files(extension):
    """The file of each run without a learning signal: by sampler, centering and seed."""
    centering = ways_to_center(SETTINGS.drift.head_sizes)
    pattern = f"<results>/drift/runs/{{sampler}}/{{centering}}/seed{{seed}}.{extension}"
    return expand(pattern, sampler=SAMPLERS, centering=centering, seed=SETTINGS.drift.seeds)


def figure(stem, category, title):
    """The files of a figure below `<results>`, one a format, as entries of Snakemake's report."""
    caption = f"../report/{os.path.basename(stem)}.rst"

    def entry(kind):
        labels = {"figure": title, "format": kind.upper()}
        return report(f"<results>/{stem}.{kind}", category=category, labels=labels, caption=caption)

    return [entry(kind) for kind in ("png", "svg", "pdf")]


SETTINGS = resolved()
ARMS = list(SETTINGS.arms)
SEEDS = SETTINGS.run.seeds
TRAINED = {arm: TrainStage.of(resolved(arm)) for arm in ARMS}
TRAINING = {arm: stage.on_the_console().to_json() for arm, stage in TRAINED.items()}
LOGGERS = {arm: json.dumps(stage.trainer.logger) for arm, stage in TRAINED.items()}
GPU = int(SETTINGS.runtime.device == "cuda")
RESULTS = f"results/{SETTINGS.experiment}"
QUANTISED = {entry.folder: name for name, entry in FORMATS.items()}
CELLS = {study: cells(SETTINGS, study) for study in STUDIES}
RUNS = expand("<results>/runs/{arm}/seed{seed}/run.json", arm=SETTINGS.run.arms, seed=SEEDS)

# GPU jobs run one at a time unless SC_RUNS_PER_GPU, a profile or --resources says otherwise.
workflow.global_resources.setdefault("gpu", int(os.environ.get("SC_RUNS_PER_GPU", "1")))

# Programs run under the interpreter that runs Snakemake, whether or not its environment is activated, and import the
# package beside them, also in the environment that `--software-deployment-method conda` makes.
prepend("PATH", Path(sys.executable).parent)
prepend("PYTHONPATH", Path(workflow.basedir).parent / "src")
