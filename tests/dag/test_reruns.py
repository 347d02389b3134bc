"""What a finished experiment runs again, and what it leaves alone."""

import os
import shutil
import time

import pytest

pytestmark = pytest.mark.dag

AFTER_TRAINING = {"figures": 1, "report": 1, "all": 1}


def test_nothing_is_left_to_do(finished):
    assert "Nothing to be done" in finished.plan("all")


def test_forcing_one_arm_trains_it_and_redraws_nothing_else(finished):
    assert finished.jobs("all", "-R", "train_sc_tis") == {"train_sc_tis": 1, **AFTER_TRAINING}


def test_programs_and_rules_may_be_edited_without_training_again(changed):
    later = time.time() + 10
    for path in (changed.folder / "workflow").rglob("*"):
        os.utime(path, (later, later))
    rules = changed.folder / "workflow/rules/train.smk"
    rules.write_text(rules.read_text().replace("--seed {wildcards.seed:q}", "--seed={wildcards.seed:q}"))
    assert "Nothing to be done" in changed.plan("all")


def test_results_copied_with_their_times_into_a_fresh_clone_are_complete(changed):
    shutil.rmtree(changed.folder / ".snakemake")
    assert "Nothing to be done" in changed.plan("all")


def test_touched_manifests_are_compared_by_content(changed):
    later = time.time() + 10
    for name in ("dataset/manifest.json", "model/manifest.json", "model/w8a8/config.json"):
        os.utime(changed.folder / "results/tiny" / name, (later, later))
    assert "Nothing to be done" in changed.plan("all")


@pytest.mark.parametrize(
    ("override", "jobs"),
    [
        ("figures={smoothing_steps: 7}", {"figures": 1, "report": 1, "all": 1}),
        (
            "precision={limits: {k3_kl: {max: 1}}}",
            {"gate_precision": 1, "smoke": 6, "gate_smoke": 6, "report": 1, "all": 1},
        ),
        (
            "arms={sc: {overrides: {trainer: {revision: 2}}}}",
            {"settings": 1, "smoke": 1, "gate_smoke": 1, "train_sc": 1, **AFTER_TRAINING},
        ),
        (
            "run={seeds: [0, 1]}",
            {f"train_{arm}": 1 for arm in ("grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis")} | AFTER_TRAINING,
        ),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(finished, override, jobs):
    assert finished.jobs("all", "--config", override) == jobs


def test_loggers_reach_the_trainers_and_retrain_nothing(finished):
    loggers = ["--config", "trainer={logger: [console, trackio]}"]
    assert "Nothing to be done" in finished.plan("all", *loggers)
    plan = finished.plan("all", "--printshellcmds", "-R", "train_sc", *loggers)
    assert plan.count("""trainer.logger='["console", "trackio"]'""") == 1


def test_a_lost_file_is_made_again_without_its_ancestors(changed):
    (changed.folder / "results/tiny/runs/sc/seed0/run.json").unlink()
    assert changed.jobs("all") == {"train_sc": 1, **AFTER_TRAINING}


def test_a_failed_gate_stops_its_dependants_and_keeps_the_numbers(fresh):
    result = fresh.snakemake("--cores", "1", "all", STUB_FAILS="gate")
    assert result.returncode == 1
    assert "error: gate fails as asked" in result.stdout
    assert (fresh.folder / "results/tiny/precision/validation.json").exists()
    assert not (fresh.folder / "results/tiny/precision/gate.json").exists()
    assert not (fresh.folder / "results/tiny/smoke").exists()
    assert (fresh.folder / "results/tiny/logs/gate_precision.log").read_text() == "error: gate fails as asked\n"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("nonsense=1", "error: nonsense: unknown key"),
        ("run={arms: [sc_tsi]}", "error: run.arms: unknown arm 'sc_tsi' (defined: "),
        ("arms={sc: {overrides: {trainer: {steps: 3}}}}", "error: trainer.steps: unknown key"),
    ],
)
def test_a_fault_in_the_configuration_is_one_line(fresh, override, line):
    result = fresh.snakemake("all", "--dry-run", "--config", override)
    assert result.returncode == 1
    assert [text for text in result.stdout.splitlines() if text.startswith(line)]
    assert "Traceback" not in result.stdout


def test_a_target_that_is_no_arm_is_an_error_at_once(fresh):
    result = fresh.snakemake("sc_tsi", "--dry-run")
    assert result.returncode == 1
    assert "No rule to produce sc_tsi" in result.stdout
