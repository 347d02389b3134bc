import json
from pathlib import Path

import pytest

from score_centering.settings import UserError, load_settings, stage_json
from score_centering.settings.dotted import deep_merge
from score_centering.settings.load import parse, parse_overrides, read_yaml, resolve
from score_centering.settings.stages import TrainStage
from score_centering.settings.studies import STUDIES, cell_stage, cells, entropy_model_stage, model_folder

DEFAULT = Path(__file__).parents[3] / "config/config.yaml"
CONFIG = read_yaml(DEFAULT)
SETTINGS = load_settings([DEFAULT])


def without_own(stage: TrainStage, study: str) -> dict:
    """The settings of a run but for those that the study's cells change."""
    dump = json.loads(stage.to_json())
    dump.pop("perturbation", None)
    if study == "stale":
        del dump["trainer"]["sync_every"], dump["actor_rollout_ref"]["actor"]["mini_batches"]
    elif study == "collapse":
        actor = dump["actor_rollout_ref"]["actor"]
        del dump["actor_rollout_ref"]["rollout"], actor["optim"]["name"], actor["optim"]["lr"], actor["grad_clip"]
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
        load_settings([DEFAULT], [f"{study}.arms=[nothing, sc]"])


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


def test_the_cells_of_the_map_by_hand():
    grid = "collapse.grid={precisions: [bf16, noise0.3], rates: [1.5], entropies: [own], bounds: [ppo, adamw]}"
    reference = "collapse.reference={precision: bf16, rate: 1.5, entropy: own, bound: ppo}"
    config = deep_merge(CONFIG, parse_overrides([grid, reference, "perturbation.weight_noise=0.5"]))
    settings = resolve(config)
    names = ["bf16+1.5+own+ppo", "bf16+1.5+own+adamw", "noise0.3+1.5+own+ppo", "noise0.3+1.5+own+adamw"]
    assert list(cells(settings, "collapse")) == names
    stages = {
        (cell, arm): cell_stage(config, settings, "collapse", cell, arm) for cell in names for arm in ("pg", "sc")
    }
    actors = {key: stage.actor_rollout_ref.actor for key, stage in stages.items()}
    # The rate multiplies the bound's own; PPO's clip is the uncorrected arm's alone, its reduction everyone's.
    assert actors[names[0], "pg"].optim.lr == 1.5 and actors[names[1], "pg"].optim.lr == pytest.approx(1.5e-3)
    assert (actors[names[0], "pg"].policy_loss, actors[names[0], "sc"].policy_loss) == ("ppo", "score_centering")
    assert actors[names[0], "sc"].loss_agg_mode == actors[names[0], "pg"].loss_agg_mode == "seq-mean-token-mean"
    assert actors[names[1], "pg"].loss_agg_mode == "token-mean" and actors[names[1], "pg"].optim.name == "adamw"
    # A precision says its own perturbation: the experiment's is not in the map.
    assert stages[names[0], "pg"].perturbation is None
    assert stages[names[2], "sc"].perturbation.model_dump() == {
        "weight_noise": 0.3, "noisy_embedding": True, "cache_fault": None,
    }  # fmt: skip


def test_an_entropy_has_a_model_of_its_own_unless_it_changes_nothing():
    filler = {"solution": "shuffled_sum", "filler": {"before_step": 0.5}}
    entropies = {"more": {"model": {"warm_start": filler}, "data": {"max_response_length": 40}}}
    grid = {"entropies": ["own", "more"], "bounds": ["clip"], "precisions": ["bf16"]}
    reference = {"precision": "bf16"}
    config = deep_merge(CONFIG, {"collapse": {"entropies": entropies, "grid": grid, "reference": reference}})
    settings = resolve(config)
    found = cells(settings, "collapse")
    assert {name: cell.entropy for name, cell in found.items()} == {
        "bf16+1+own+clip": None, "bf16+1+more+clip": "more",
    }  # fmt: skip
    assert model_folder("results/x", None) == "results/x"
    assert model_folder("results/x", "more") == "results/x/collapse/entropies/more"
    stage = entropy_model_stage(config, settings, "more")
    assert stage.model.warm_start.filler.before_step == 0.5 and stage.max_response_length == 40
    assert cell_stage(config, settings, "collapse", "bf16+1+more+clip", "sc").data.max_response_length == 40
    assert cell_stage(config, settings, "collapse", "bf16+1+own+clip", "sc").data.max_response_length == 24


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "collapse.grid.bounds=[clip, nothing]",
            r"collapse: grid\.bounds: 'nothing' is not defined \(defined: adamw, clip",
        ),
        ("collapse.grid.rates=[1, 1.0]", "collapse: rates lists an entry twice"),
        ("collapse.control=int8", r"collapse: control: 'int8' is not in grid\.precisions = \['bf16', 'int8_int4kv', "),
        ("collapse.reference.rate=2", r"collapse: reference\.rate: 2\.0 is not in grid\.rates = \[1\.0\]"),
        ("collapse.arms=[sc]", r"collapse\.arms = \['sc'\]: list should have at least 2 items"),
        ("collapse.bounds.clip.lr=0", r"collapse\.bounds\.clip\.lr = 0"),
        ("collapse.grid.rate=[1]", r"collapse\.grid\.rate: unknown key; did you mean collapse\.grid\.rates\?"),
    ],
)
def test_a_map_that_is_not_defined_is_refused(override, line):
    with pytest.raises(UserError, match=line):
        load_settings([DEFAULT], [override])


def test_the_full_map_has_its_cells_and_two_drift_measurements_in_the_first_five_updates():
    files = [DEFAULT, DEFAULT.with_name("collapse.yaml"), DEFAULT.with_name("collapse_map.yaml")]
    settings = load_settings(files)
    assert len(cells(settings, "collapse")) == 216 and len(settings.collapse.seeds) == 3
    frequency = settings.collapse.overrides["trainer"]["drift_freq"]
    assert [step for step in range(1, 6) if (step - 1) % frequency == 0] == [1, 5]
