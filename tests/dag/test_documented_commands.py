"""Commands of the documentation that only plan or report; see tests/unit/project/test_docs_commands.py."""

import json
import zipfile

import pytest

pytestmark = pytest.mark.dag

COLLAPSE = ["config/collapse.yaml", "config/collapse_laptop.yaml"]
B200 = ["--configfile", "config/b200.yaml"]


def test_an_arm_that_run_arms_does_not_name_is_trained_by_name(fresh):
    assert fresh.jobs("sc_icepop")["train_sc_icepop"] == 1


def test_the_exact_control(fresh):
    assert fresh.jobs("grpo_exact", "--configfile", "config/exact.yaml")["train_grpo_exact"] == 1


def test_stages_of_full_scale_by_their_files(fresh):
    jobs = fresh.jobs("results/b200/precision/gate.json", *B200)
    assert jobs == {"dataset": 1, "model": 1, "quantise": 1, "validate": 1, "gate_precision": 1}


def test_the_collapse_trains_its_six_arms_on_a_gpu_and_on_two_cores(fresh):
    arms = ("grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis")
    for files, seeds in ((COLLAPSE[:1], 5), (COLLAPSE, 1)):
        jobs = fresh.jobs("all", "--configfile", *files)
        assert {arm: jobs[f"train_{arm}"] for arm in arms} == dict.fromkeys(arms, seeds)


@pytest.mark.parametrize("preset", ["h200_x2", "node8"])
def test_presets_of_several_gpus_plan_what_one_gpu_does(fresh, preset):
    assert fresh.jobs("all", *B200, f"config/{preset}.yaml") == fresh.jobs("all", *B200)


def test_the_slurm_profile_plans_without_its_plugin(fresh):
    profile = ["-e", "dryrun", "--workflow-profile", "workflow/profiles/slurm"]
    assert fresh.jobs("all", *profile, *B200) == fresh.jobs("all", *B200)


def test_snakemake_report_has_every_figure(finished):
    result = finished.snakemake("--report", "report.zip")
    assert result.returncode == 0, result.stdout
    with zipfile.ZipFile(finished.folder / "report.zip") as report:
        page = report.read("report/report.html").decode()
    entries, categories = (embedded(page, name) for name in ("results", "categories"))
    files = {name: sum(map(len, parts.values())) for name, parts in categories.items()}
    assert files == {"Precision": 3, "Runs": 28, "Report": 1}
    assert all(entry["caption"].startswith("<p><strong>") for entry in entries.values())
    labels = [tuple(entry["labels"].values()) for entry in entries.values()]
    assert len(set(labels)) == len(labels) == 32
    assert ("Reward against K3", "SVG") in labels


def embedded(page: str, name: str) -> dict:
    """The object that Snakemake's page assigns to the variable `name`."""
    start = f'var {name} = {{"'
    return json.JSONDecoder().raw_decode(page[page.index(start) + len(start) - 2 :])[0]
