import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.settings import STAGES, UserError, cli, load_settings, resolve, stage_json
from score_centering.settings.dotted import deep_merge
from score_centering.settings.json_schema import key_table, schema_text
from score_centering.settings.stages import FaultCheckStage, QuantizationStage, TrainStage, precisions_of_arms
from score_centering.settings.training_blocks import ScoreCentering

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "config/config.yaml"
PRESETS = sorted(path for path in (ROOT / "config").glob("*.yaml") if path != DEFAULT)


def default() -> dict:
    return yaml.safe_load(DEFAULT.read_text())


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_settings([DEFAULT], overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("preset", [None, *PRESETS], ids=lambda path: path.stem if path else "default")
def test_every_preset_resolves_for_every_arm_and_smoke(preset):
    files = [DEFAULT] if preset is None else [DEFAULT, preset]
    for arm in load_settings(files).run.arms:
        for smoke in (False, True):
            load_settings(files, arm=arm, smoke=smoke)


def test_schema_file_is_current():
    assert (ROOT / "workflow/schemas/config.schema.json").read_text() == schema_text(), "run `make schema`"


def test_key_table_is_current_and_explains_every_key():
    table = key_table()
    assert (ROOT / "config/README.md").read_text().endswith(table), "run `make schema`"
    assert not [row for row in table.splitlines() if row.endswith("|  |")]


def test_arms_differ_in_objective_and_rollout_precision_only():
    allowed = {"score_centering", "actor_rollout_ref"}
    runs = {arm: load_settings([DEFAULT], arm=arm) for arm in load_settings([DEFAULT]).run.arms}
    dumps = {arm: json.loads(stage_json(settings, "train")) for arm, settings in runs.items()}
    for dump in dumps.values():
        for key in allowed & dump.keys():
            if key == "actor_rollout_ref":
                for name in ("policy_loss", "loss_agg_mode"):
                    del dump[key]["actor"][name]
                del dump[key]["rollout"]["quantization"]
                del dump[key]["rollout"]["engine_kwargs"]["vllm"]["kv_cache_dtype"]
            else:
                for name in ("enabled", "centering", "is_mode"):
                    del dump[key][name]
    reference = dumps["grpo"]
    assert all(dump == reference for dump in dumps.values())


@pytest.mark.parametrize(
    ("settings", "candidates"),
    [
        ({}, 0),
        ({"centering": True}, 7),
        ({"enabled": True}, 7),  # an arm without centering records them for what they tell
        ({"enabled": True, "centering": True}, 7),  # as the published example writes it
        ({"enabled": False}, 0),
    ],
)
def test_candidates_are_recorded_where_centering_needs_them_or_on_request(settings, candidates):
    assert ScoreCentering(top_logprobs_num=7, **settings).candidates == candidates


def test_published_recipe():
    settings = load_settings([DEFAULT, ROOT / "config/b200.yaml"])
    rollout, actor, trainer = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.actor, settings.trainer
    assert settings.dataset.hub.repo == "PrimeIntellect/INTELLECT-2-only-math"
    assert settings.dataset.hub.revision == "169e067d356aaca3cd8e860c7b900283df02f53d"
    assert (settings.dataset.val_size, settings.dataset.seed) == (500, 42)
    assert (trainer.name, rollout.name) == ("verl", "vllm")
    assert (trainer.total_training_steps, settings.data.train_batch_size, rollout.n) == (200, 32, 4)
    assert (actor.optim.lr, actor.ppo_micro_batch_size_per_gpu) == (1e-6, 1)
    assert (settings.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k) == (8192, 1, 1, -1)
    assert (trainer.test_freq, trainer.val_before_train) == (16, False)
    assert not actor.fsdp_config.param_offload and not actor.fsdp_config.optimizer_offload
    assert (rollout.quantization, rollout.engine_kwargs.vllm.kv_cache_dtype) == ("int8", "int4_per_token_head")
    # Without one the format chooses the kernel: "triton" for INT8, see the golden configuration of verl.
    assert rollout.engine_kwargs.vllm.linear_backend is None
    assert rollout.engine_kwargs.vllm.attention_backend == "TRITON_ATTN"
    assert settings.score_centering.top_logprobs_num == 128


def test_order_of_layers(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("trainer: {total_training_steps: 7, save_freq: 3}\n")
    files = [DEFAULT, preset]
    assert load_settings(files).trainer.total_training_steps == 7
    assert load_settings(files, smoke=True).trainer.total_training_steps == 3
    assert load_settings(files, smoke=True).trainer.save_freq == -1
    assert load_settings(files, ["trainer.total_training_steps=9"], smoke=True).trainer.total_training_steps == 9
    assert load_settings(files, ["score_centering.is_mode=mis"], arm="sc_tis").score_centering.is_mode == "mis"
    config = deep_merge(default(), {"arms": {"sc": {"overrides": {"trainer": {"total_training_steps": 11}}}}})
    assert resolve(config, arm="sc", smoke=True).trainer.total_training_steps == 11


@pytest.mark.parametrize("prefix", ["", "agentlightning.", "default_proxy."])
def test_published_prefixes(prefix):
    settings = load_settings([DEFAULT], [f"{prefix}score_centering.top_logprobs_num=16"])
    assert settings.score_centering.top_logprobs_num == 16


def test_environment_names_the_model(monkeypatch):
    files = [DEFAULT, ROOT / "config/b200.yaml"]
    monkeypatch.delenv("SC_MODEL", raising=False)
    assert load_settings(files).model.hub.repo == "Qwen/Qwen3.5-9B"
    monkeypatch.setenv("SC_MODEL", "someone/other")
    assert load_settings(files).model.hub.repo == "someone/other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=3", "trainer.steps: unknown key"),
        ("run.arms=[nothing]", "run.arms: unknown arm 'nothing' (defined: "),
        ("run.control=nothing", "run.control: unknown arm 'nothing' (defined: "),
        ("run.arms=[sc, sc]", "lists an entry twice"),
        (
            "score_centering.top_logprobs_num=513",
            "score_centering.top_logprobs_num = 513 exceeds the vocabulary of 512",
        ),
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p = 0.9"),
        ("actor_rollout_ref.rollout.top_k=50", "actor_rollout_ref.rollout.top_k = 50"),
        ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature = 0"),
        ("actor_rollout_ref.rollout.temperature=-1", "actor_rollout_ref.rollout.temperature = -1"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n = 1"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.mini_batches=7", "does not divide"),
        ("score_centering={enabled: false, centering: true}", "score_centering: centering needs the candidates"),
        ("experiment=../elsewhere", "experiment = '../elsewhere'"),
        ("dataset.source=hub", "the block dataset.hub is missing"),
        ("model.source=path", "the block model.path is missing"),
        ("trainer.total_training_steps", "write key=value"),
        ("trainer.total_training_steps=[", "is not valid YAML"),
    ],
)
def test_faults_are_one_line_with_their_place(override, message):
    assert message in refused(override)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: cannot read the configuration: No such file"):
        load_settings([tmp_path / "nowhere.yaml"])
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [\n")
    with pytest.raises(UserError, match=r"broken\.yaml: not valid YAML"):
        load_settings([broken])
    broken.write_text("- a\n")
    with pytest.raises(UserError, match="must be a mapping"):
        load_settings([broken])


def test_yaml_cannot_run_code(tmp_path):
    marker = tmp_path / "ran"
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(
        f"experiment: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]\n"
    )
    with pytest.raises(UserError, match="not valid YAML"):
        load_settings([hostile])
    assert not marker.exists()


@pytest.mark.parametrize("stage", STAGES)
def test_stage_json_round_trips_and_is_stable(stage):
    settings = load_settings([DEFAULT], arm="sc")
    text = stage_json(settings, stage)
    assert text == stage_json(load_settings([DEFAULT], arm="sc"), stage)
    assert STAGES[stage].model_validate_json(text).to_json() == text


def test_training_settings_reach_the_training_stages_only():
    before, after = load_settings([DEFAULT]), load_settings([DEFAULT], ["actor_rollout_ref.actor.optim.lr=0.5"])
    changed = {stage for stage in STAGES if stage_json(before, stage) != stage_json(after, stage)}
    assert changed == {"train", "smoke"}


def test_loggers_change_no_more_than_where_a_run_is_shown():
    before, after = (load_settings([DEFAULT], chosen, "sc") for chosen in ([], ["trainer.logger=[wandb, trackio]"]))
    assert TrainStage.of(before) != TrainStage.of(after)
    assert TrainStage.of(before).on_the_console() == TrainStage.of(after).on_the_console()
    assert stage_json(before, "drift") == stage_json(after, "drift")


def test_overrides_are_laid_over_the_settings_of_a_stage():
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    text = stage_json(load_settings([DEFAULT], arm="sc"), "train")
    stage = cli.read(parser.parse_args(["--settings", text, 'trainer.logger=["console", "wandb"]']), TrainStage)
    assert stage == TrainStage.of(load_settings([DEFAULT], ["trainer.logger=[console, wandb]"], "sc"))
    with pytest.raises(UserError, match=r"^trainer\.logger\.0 = 'paper': "):
        cli.read(parser.parse_args(["--settings", text, "trainer.logger=[paper]"]), TrainStage)


def test_a_description_retrains_nothing():
    config = default()
    config["arms"]["sc"]["description"] = "another text"
    assert stage_json(resolve(config, arm="sc"), "train") == stage_json(load_settings([DEFAULT], arm="sc"), "train")


def test_imports_no_torch():
    code = "import sys, score_centering.settings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=5,
)


def paths(node: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in node.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


@settings(deadline=None)
@given(st.sampled_from(paths(default())), KEYS)
def test_any_value_anywhere_is_accepted_or_refused_in_plain_lines(path, value):
    overlay: object = value
    for key in reversed(path):
        overlay = {key: overlay}
    try:
        resolve(deep_merge(default(), overlay))
    except UserError as error:
        assert all(line.strip() for line in str(error).splitlines())


def test_a_precision_is_one_setting():
    """The checkpoint, what is validated and what a run reads all follow from `rollout.quantization`."""
    given = load_settings([DEFAULT], ["actor_rollout_ref.rollout.quantization=fp8"])
    results = Path("results/tiny")
    assert TrainStage.of(given).quantised_config(results) == results / "model/fp8_dynamic/config.json"
    assert QuantizationStage.of(given).format == "fp8"
    measured = [precision.name for precision in precisions_of_arms(given)]
    assert measured == ["bf16", "fp8_int4kv"]
    assert list(FaultCheckStage.of(given).limits) == [
        "fp8_int4kv.repeat.equal_tokens_share",
        "fp8_int4kv.repeat.not_finite_logprobs",
        "fp8_int4kv.abs_logprob_gap_mean",
    ]  # fmt: skip


def test_an_unknown_format_is_refused_with_the_list():
    with pytest.raises(UserError, match=r"rollout\.quantization = 'int9'.*'int8', 'fp8', 'int4'"):
        load_settings([DEFAULT], ["actor_rollout_ref.rollout.quantization=int9"])


def test_how_answers_are_scored_reruns_no_validation():
    stages = [
        stage_json(load_settings([DEFAULT], overrides), "validation")
        for overrides in ([], ["runtime.reward_workers=3", "runtime.reward_timeout_seconds=1"], ["runtime.threads=2"])
    ]
    assert stages[0] == stages[1] != stages[2]
