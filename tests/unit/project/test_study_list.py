"""benchmarks/study_list.py: each line trains what the study trains."""

import subprocess
import sys
from functools import reduce
from itertools import pairwise
from pathlib import Path

import pytest

from score_centering.settings.dotted import deep_merge
from score_centering.settings.load import interpolate, load_settings, read_yaml, resolve
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import cell_stage, cells, model_folder

ROOT = Path(__file__).parents[3]
MAP = ["config/collapse.yaml", "config/collapse_map.yaml"]


def listed(*arguments: str) -> list[str]:
    command = [sys.executable, "benchmarks/study_list.py", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def files(presets):
    return [word for preset in presets for word in ("--configfile", preset)]


@pytest.mark.parametrize(
    ("study", "presets", "count"),
    [
        ("collapse", MAP, 216 * 2 * 3),
        ("stale", ["config/collapse.yaml", "config/collapse_stale.yaml"], 30),
        ("sweep", [], 12),
    ],
)
def test_a_line_trains_what_the_study_trains(study, presets, count):
    """Every 37th line of the map, every third of the others: settings, seed, and the model that it starts from."""
    paths = [ROOT / "config/config.yaml", *(ROOT / preset for preset in presets)]
    config = interpolate(reduce(deep_merge, map(read_yaml, paths)))
    settings = resolve(config)
    lines = listed(study, *files(presets))
    assert len(lines) == count == len({line.split()[0] for line in lines})
    for line in lines[:: 37 if count > 100 else 3]:
        name, arm, seed, *words = line.split()
        cell, *place = name.split("/")
        assert place == [arm, f"seed{seed}"] and int(seed) in getattr(settings, study).seeds
        options = dict(pairwise(words))
        overrides = [word for word in words if "=" in word]
        by_hand = TrainStage.of(load_settings([str(path) for path in paths], overrides, arm))
        assert by_hand == cell_stage(config, settings, study, cell, arm), line
        folder = model_folder(f"results/{settings.experiment}", cells(settings, study)[cell].entropy)
        if "entropies" in folder:
            assert options["--model-manifest"] == f"{folder}/model/manifest.json"
            quantised = by_hand.quantised_config(Path(folder))
            assert options.get("--quantised-config") == (None if quantised is None else str(quantised))
        else:
            assert "--model-manifest" not in options


def test_the_models_of_the_map_are_targets_of_the_workflow():
    lines = listed("collapse", "--models", *files(MAP), "experiment=mine")
    models = [line for line in lines if line.endswith("manifest.json")]
    assert models == [
        "results/mine/collapse/entropies/filler0/model/manifest.json",
        "results/mine/collapse/entropies/filler0.3/model/manifest.json",
        "results/mine/model/manifest.json",
    ]
    assert len(lines) == 9 and len(set(lines)) == 9  # each in INT8 and INT4 too
