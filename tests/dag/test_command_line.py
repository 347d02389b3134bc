"""Settings by dotted key on Snakemake's command line, and what it says last when a job fails."""

import json

import pytest

pytestmark = pytest.mark.dag


def test_a_dotted_key_is_one_setting(changed):
    jobs = changed.jobs("all", "--config", "set=trainer.total_training_steps=5")
    arms = ("grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis")
    assert jobs["smoke"] == jobs["dataset"] == 0, "a smoke run has its own number of steps"
    assert {name for name in jobs if name.startswith("train_")} == {f"train_{arm}" for arm in arms}
    changed.run("results/tiny/settings/sc.json", "--config", "set=trainer.total_training_steps=5")
    written = json.loads((changed.folder / "results/tiny/settings/sc.json").read_text())
    assert written["trainer"]["total_training_steps"] == 5


def test_several_dotted_keys(fresh):
    jobs = fresh.jobs("all", "--config", 'set=["run.arms=[sc]", run.control=null, "run.seeds=[0,1,2]"]')
    assert {name: count for name, count in jobs.items() if name.startswith("train_")} == {"train_sc": 3}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("trainer", "error: override 'trainer': write key=value, for instance trainer.total_training_steps=5"),
        ("trainer.lr=5", "error: trainer.lr: unknown key; did you mean actor_rollout_ref.actor.optim.lr or drift.opt"),
        ("trainer.save_frq=5", "error: trainer.save_frq: unknown key; did you mean trainer.save_freq?"),
    ],
)
def test_a_fault_in_one_is_one_line(fresh, given, line):
    result = fresh.snakemake("-n", "all", "--config", f"set={given}")
    assert result.returncode == 1 and result.stdout.splitlines()[-1].startswith(line)


def test_the_programs_line_comes_last(changed):
    result = changed.snakemake("--cores", "1", "all", "-R", "validate", STUB_FAILS="validate")
    assert result.returncode == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert lines == ["error: validate fails as asked"] * 2, "once when it happens, once at the end"
    after = result.stdout.rpartition("error: validate fails as asked")[2].strip().splitlines()
    assert len(after) <= 5 and not any("rror in rule" in line for line in after), after
