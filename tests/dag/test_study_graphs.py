"""The studies: targets of their own, which `all` does not need."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.dag


def test_sweep_trains_its_grid_and_needs_no_gate(fresh):
    assert fresh.jobs("sweep") == {
        "dataset": 1, "model": 1, "quantise": 1, "study_settings": 12, "study_run": 12, "sweep": 1,
    }  # fmt: skip


def test_stale_trains_its_grid(fresh):
    jobs = fresh.jobs("stale")
    assert (jobs["study_run"], jobs["study_settings"], jobs["stale"]) == (24, 24, 1)


def test_the_collapse_trains_its_grid(fresh):
    assert fresh.jobs("collapse") == {
        "dataset": 1, "model": 1, "quantise": 1, "study_settings": 12, "study_run": 12, "collapse": 1,
    }  # fmt: skip


def test_the_map_makes_a_model_for_each_of_its_entropies(fresh):
    """216 cells, of which the third with the experiment's own model needs no further one; formats: INT8, INT4."""
    jobs = fresh.jobs("collapse", "--configfile", "config/collapse.yaml", "config/collapse_map.yaml")
    assert jobs == {
        "dataset": 1, "model": 1, "quantise": 2, "collapse_model": 2, "collapse_quantise": 4, "study_settings": 432,
        "study_run": 1296, "collapse": 1,
    }  # fmt: skip


def test_the_map_of_the_tests_is_its_golden_graph(fresh, graph_of):
    """Each run depends on the model of its own entropy."""
    planned = graph_of(fresh.plan("collapse", "--configfile", "config/test.yaml"))
    golden = Path(__file__).parent / "golden" / "collapse.txt"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(planned)
    assert planned == golden.read_text()


def test_faults_check_the_engine_and_train_the_arms(fresh):
    jobs = fresh.jobs("faults")
    assert (jobs["fault_check"], jobs["study_run"], jobs["faults"]) == (1, 8, 1)


def test_drift_runs_each_sampler_with_each_way_to_center(fresh):
    assert fresh.jobs("drift") == {
        "dataset": 1, "model": 1, "quantise": 1, "drift_run": 10, "drift_table": 1, "drift": 1,
    }  # fmt: skip


def test_all_needs_no_study(fresh):
    assert not {"study_run", "fault_check", "drift_run"} & set(fresh.jobs("all"))


def test_a_studys_own_loggers_reach_its_trainers_and_no_settings(fresh):
    grid = "columns: [bf16], arms: [sc]"
    plans = [
        fresh.plan(
            "sweep", "--printshellcmds", "--config", f"sweep={{{grid}, overrides: {{trainer: {{logger: {logger}}}}}}}"
        )
        for logger in ("[console]", "[console, trackio]")
    ]
    settings = [[line for line in plan.splitlines() if "printf" in line] for plan in plans]
    assert len(settings[0]) == 1 and settings[0] == settings[1]
    assert plans[1].count("""trainer.logger='["console", "trackio"]'""") == 1


def test_a_preset_may_choose_other_cells(fresh):
    jobs = fresh.jobs("sweep", "--config", "sweep={columns: [bf16, int8], arms: [sc], seeds: [0, 7]}")
    assert jobs["study_run"] == 4
