import json
from pathlib import Path

import pytest

from score_centering.settings import UserError, load_settings, stage_json
from score_centering.settings.load import parse, read_yaml
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import STUDIES, cell_stage, cells

DEFAULT = Path(__file__).parents[3] / "config/config.yaml"
CONFIG = read_yaml(DEFAULT)
SETTINGS = load_settings([DEFAULT])


@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_resolves_for_every_arm_and_only_its_own_settings_change(study):
    grid = getattr(SETTINGS, study)
    for arm in grid.arms:
        stages = {cell: cell_stage(CONFIG, SETTINGS, study, cell, arm) for cell in cells(SETTINGS, study)}
        assert len({stage.to_json() for stage in stages.values()}) == len(stages)
        for stage in stages.values():
            dump = json.loads(stage.to_json())
            dump.pop("perturbation", None)
            del dump["actor_rollout_ref"]["rollout"]
            first = json.loads(next(iter(stages.values())).to_json())
            del first["actor_rollout_ref"]["rollout"]
            assert dump == first
            assert stage.trainer.total_training_steps == grid.overrides["trainer"]["total_training_steps"]


def test_an_arm_keeps_its_objective_in_every_cell():
    stage = cell_stage(CONFIG, SETTINGS, "sweep", "bf16", "sc")
    assert stage.score_centering.centering and stage.actor_rollout_ref.rollout.quantization is None


def test_no_configuration_key_perturbs_a_run():
    with pytest.raises(UserError, match="perturbation: unknown key"):
        load_settings([DEFAULT], ["perturbation.weight_noise=0.1"])
    normal = json.loads(stage_json(load_settings([DEFAULT], arm="sc"), "train"))
    assert "perturbation" not in normal and "perturbation" not in TrainStage.model_validate(normal).identity()


def test_a_perturbation_is_part_of_the_identity():
    faulty = cell_stage(CONFIG, SETTINGS, "faults", "codes-0.01", "sc")
    assert faulty.identity()["perturbation"] == {
        "weight_noise": 0.0, "cache_fault": {"rate": 0.01, "kind": "codes", "transient": True},
    }  # fmt: skip
    assert TrainStage.model_validate_json(faulty.to_json()) == faulty
    noisy = cell_stage(CONFIG, SETTINGS, "sweep", "int8_noise", "grpo")
    assert noisy.identity()["perturbation"]["weight_noise"] == 0.1


@pytest.mark.parametrize("study", STUDIES)
def test_unknown_arms_are_refused(study):
    with pytest.raises(UserError, match=rf"{study}\.arms: unknown arm 'nothing'"):
        load_settings([DEFAULT], [f"{study}.arms=[nothing]"])


def test_unknown_columns_are_refused():
    with pytest.raises(UserError, match=r"sweep: columns: unknown precision 'fp4' \(defined: bf16, int8"):
        load_settings([DEFAULT], ["sweep.columns=[fp4]"])


def test_only_the_local_trainer_is_perturbed():
    faulty = json.loads(cell_stage(CONFIG, SETTINGS, "faults", "codes-0.01", "sc").to_json())
    faulty["trainer"]["name"] = "verl"
    with pytest.raises(UserError, match=r"a perturbed run needs trainer\.name local"):
        parse(TrainStage, faulty)
