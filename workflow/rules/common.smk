"""The settings of each stage, and the names that the configuration gives to arms and seeds."""

import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from score_centering.settings import UserError, resolve, stage_json


def resolved(arm=None, smoke=False):
    """Settings of one arm, or of no arm in particular; a fault in the configuration ends the run with its line."""
    try:
        return resolve(config, arm=arm, smoke=smoke)
    except UserError as error:
        raise WorkflowError(str(error)) from None


SETTINGS = resolved()
ARMS = list(SETTINGS.arms)
SEEDS = SETTINGS.run.seeds
GPU = int(SETTINGS.runtime.device == "cuda")
# Set SC_INT8_CONFIG, or the setting itself, to validate and use a W8A8 model instead of building one.
W8A8_CONFIG = SETTINGS.actor_rollout_ref.rollout.quantization_config_file or "<results>/model/w8a8/config.json"
RUNS = expand("<results>/runs/{arm}/seed{seed}/run.json", arm=SETTINGS.run.arms, seed=SEEDS)

# GPU jobs run one at a time unless a profile or --resources says otherwise.
workflow.global_resources.setdefault("gpu", 1)

# Programs run under the interpreter that runs Snakemake, whether or not its environment is activated.
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))
