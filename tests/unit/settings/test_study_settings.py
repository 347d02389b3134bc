import json
from pathlib import Path

import pytest

from score_centering.settings import UserError, load_settings, stage_json
from score_centering.settings.dotted import deep_merge
from score_centering.settings.load import parse, read_yaml, resolve
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import STUDIES, cell_stage, cells

DEFAULT = Path(__file__).parents[3] / "config/config.yaml"
CONFIG = read_yaml(DEFAULT)
SETTINGS = load_settings([DEFAULT])


def without_own(stage: TrainStage, study: str) -> dict:
    """The settings of a run but for those that the study's cells change."""
    dump = json.loads(stage.to_json())
    dump.pop("perturbation", None)
    if study == "stale":
        del dump["trainer"]["sync_every"], dump["actor_rollout_ref"]["actor"]["mini_batches"]
    else:
        del dump["actor_rollout_ref"]["rollout"]
    return dump


@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_resolves_for_every_arm_and_only_its_own_settings_change(study):
    grid = getattr(SETTINGS, study)
    for arm in grid.arms:
        stages = {cell: cell_stage(CONFIG, SETTINGS, study, cell, arm) for cell in cells(SETTINGS, study)}
        assert len({stage.to_json() for stage in stages.values()}) == len(stages)
        first = without_own(next(iter(stages.values())), study)
        for stage in stages.values():
            assert without_own(stage, study) == first
            assert stage.trainer.total_training_steps == grid.overrides["trainer"]["total_training_steps"]


def test_an_arm_keeps_its_objective_in_every_cell():
    stage = cell_stage(CONFIG, SETTINGS, "sweep", "bf16", "sc")
    assert stage.score_centering.centering and stage.actor_rollout_ref.rollout.quantization is None


def test_a_run_is_perturbed_only_where_the_configuration_says_so():
    normal = json.loads(stage_json(load_settings([DEFAULT], arm="sc"), "train"))
    assert "perturbation" not in normal and "perturbation" not in TrainStage.model_validate(normal).identity()
    noisy = json.loads(stage_json(load_settings([DEFAULT], ["perturbation.weight_noise=0.1"], arm="sc"), "train"))
    assert noisy["perturbation"] == {"weight_noise": 0.1, "noisy_embedding": False, "cache_fault": None}
    arms = {"sc": {"overrides": {"perturbation": None}}}
    config = deep_merge(CONFIG, {"perturbation": {"weight_noise": 0.1}, "arms": arms})
    assert TrainStage.of(resolve(config, arm="sc")).perturbation is None
    assert TrainStage.of(resolve(config, arm="grpo")).perturbation.weight_noise == 0.1


def test_verl_takes_no_perturbation():
    with pytest.raises(UserError, match=r"perturbation: needs trainer.name local"):
        load_settings([DEFAULT], ["perturbation.weight_noise=0.1", "trainer.name=verl"])


def test_a_study_s_perturbation_takes_the_place_of_the_configured_one():
    config = deep_merge(CONFIG, {"perturbation": {"weight_noise": 0.1}})
    faulty = cell_stage(config, SETTINGS, "faults", "codes-0.01", "sc")
    assert faulty.perturbation.weight_noise == 0.0 and faulty.perturbation.cache_fault.rate == 0.01


def test_a_perturbation_is_part_of_the_identity():
    faulty = cell_stage(CONFIG, SETTINGS, "faults", "codes-0.01", "sc")
    assert faulty.identity()["perturbation"] == {
        "weight_noise": 0.0,
        "noisy_embedding": False,
        "cache_fault": {"rate": 0.01, "kind": "codes", "transient": True},
    }
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
    with pytest.raises(UserError, match=r"perturbation: needs trainer\.name local"):
        parse(TrainStage, faulty)


def test_the_cells_of_the_stale_samplers_by_hand():
    assert list(cells(SETTINGS, "stale")) == ["sync1", "sync8", "sync32", "sync8-batches4"]
    stage = cell_stage(CONFIG, SETTINGS, "stale", "sync8-batches4", "sc_tis")
    assert (stage.trainer.sync_every, stage.actor_rollout_ref.actor.mini_batches) == (8, 4)
    assert stage.identity()["trainer"]["sync_every"] == 8
    stage = cell_stage(CONFIG, SETTINGS, "stale", "sync32", "grpo")
    assert (stage.trainer.sync_every, stage.actor_rollout_ref.actor.mini_batches) == (32, 1)
    with pytest.raises(UserError, match="stale: columns lists an entry twice"):
        load_settings([DEFAULT], ["stale.columns=[{sync_every: 2}, {sync_every: 2, mini_batches: 1}]"])
