"""Arms that extend others, and keys that were probably meant."""

import pytest

from score_centering.settings import DEFAULT_CONFIG, UserError, load_settings, resolve
from score_centering.settings.dotted import deep_merge
from score_centering.settings.load import read_yaml
from score_centering.settings.stages import FiguresStage


@pytest.fixture(scope="module")
def default():
    return read_yaml(DEFAULT_CONFIG)


def with_arms(default, **arms):
    return deep_merge(default, {"arms": {name: {"description": name, **arm} for name, arm in arms.items()}})


def test_an_arm_lays_its_overrides_over_those_of_the_arms_it_extends(default):
    config = with_arms(
        default,
        a={"overrides": {"score_centering": {"centering": True, "tis_max": 3.0}, "data": {"train_batch_size": 4}}},
        b={"extends": "a", "overrides": {"score_centering": {"tis_max": 4.0}}},
        c={"extends": "b", "overrides": {"score_centering": {"is_mode": "tis"}}},
    )
    resolved = resolve(config, arm="c")
    chosen = resolved.score_centering
    assert (chosen.centering, chosen.tis_max, chosen.is_mode) == (True, 4.0, "tis")
    assert resolved.data.train_batch_size == 4
    assert resolve(config, arm="a").score_centering.tis_max == 3.0


def test_an_arm_of_a_preset_extends_one_of_the_default(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        "arms: {mine: {description: mine, extends: sc_tis, overrides: {score_centering: {tis_max: 9}}}}\n"
    )
    mine = load_settings([DEFAULT_CONFIG, preset], arm="mine")
    assert (mine.score_centering.is_mode, mine.score_centering.centering) == ("tis", True)
    assert (mine.score_centering.tis_max, mine.actor_rollout_ref.actor.policy_loss) == (9.0, "score_centering")


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ({"a": {"extends": "nothing"}}, "arms.a.extends: unknown arm 'nothing' (defined: a, grpo, "),
        ({"a": {"extends": "a"}}, "arms.a.extends: a → a is a circle"),
        ({"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "a"}}, "extends: a → b → c → a is a circle"),
    ],
)
def test_what_cannot_be_extended_is_one_line(default, arms, message):
    with pytest.raises(UserError) as error:
        resolve(with_arms(default, **arms))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_overrides_of_an_arm_on_the_command_line_count():
    given = ["arms.sc.overrides.trainer.total_training_steps=3"]
    assert load_settings([DEFAULT_CONFIG], given, arm="sc_kpop").trainer.total_training_steps == 3
    assert load_settings([DEFAULT_CONFIG], given, arm="grpo").trainer.total_training_steps == 60


def test_labels_reach_the_figures_and_nothing_is_written_without_one(default):
    labelled = resolve(with_arms(default, mine={"label": "My arm"}), ["run.arms=[sc, mine]"])
    assert FiguresStage.of(labelled).labels == {"mine": "My arm"}
    assert "labels" not in FiguresStage.of(resolve(default)).to_json()


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.total_steps=3", "trainer.total_training_steps"),
        ("trianer.save_freq=3", "trainer"),
        ("arms.sc.overides={}", "arms.sc.overrides"),
        ("dataset.colums.prompt=a", "dataset.columns"),
        ("precision.limits.int8.k3_kl.maximum=1", None),
        ("grad_clip=1", "actor_rollout_ref.actor.grad_clip"),
        ("sweep.precisions.int8.weight_nois=1", "sweep.precisions.int8.weight_noise"),
        ("xyzzy=1", None),
    ],
)
def test_an_unknown_key_says_which_was_probably_meant(override, meant):
    with pytest.raises(UserError) as error:
        load_settings([DEFAULT_CONFIG], [override])
    (line,) = str(error.value).splitlines()
    assert "unknown key" in line
    assert line.endswith(f"; did you mean {meant}?") if meant else "did you mean" not in line
