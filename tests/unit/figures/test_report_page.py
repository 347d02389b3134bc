import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from score_centering.figures.experiment import read_experiment
from score_centering.figures.report import render
from score_centering.figures.task_section import task
from score_centering.settings import UserError

PROGRAMS = Path(__file__).parents[3] / "workflow" / "scripts"
VOID = {"meta", "link", "img"}


class Checker(HTMLParser):
    """Refuses tags that are not closed in order; collects ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] for name in ("href", "src") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def page(tiny, synthetic):
    return render(read_experiment(tiny, control="grpo_bf16"), dict.fromkeys(synthetic.ARMS, "what <it> does"), tiny)


def test_it_is_one_well_formed_offline_file(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert all(address.startswith(("#", "data:")) for address in checker.addresses)
    assert {address[1:] for address in checker.addresses if address.startswith("#")} <= set(checker.ids)
    outside = re.sub(r'"data:[^"]*"', "", page)
    assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", outside)


def test_it_says_what_it_should(page):
    for text in (
        "GRPO (", "collapsed", "top1_agreement", "nonfinite_updates", "chain_sum", "0.1.25",
        "score_centering.centering",
        "package_sha256", "snakemake --cores 1 all -R train_sc_tis", "what &lt;it&gt; does",
    ):  # fmt: skip
        assert text in page, text
    assert not re.search(r"\bnan\b|\bNone\b", page) and "what <it>" not in page


def test_embedded_numbers_are_those_of_the_runs(page, tiny):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert [arm["name"] for arm in data["arms"]] == ["grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis"]
    reward = next(chart for chart in data["charts"] if chart["id"] == "reward")
    run = read_experiment(tiny, ["sc"]).runs[0]
    assert reward["series"][2]["raw"][1] == pytest.approx(run.metrics["reward_mean"], rel=1e-4)
    heads = next(chart for chart in data["charts"] if chart["id"] == "head_mass")
    assert [series["arm"] for series in heads["series"]] == [2, 3, 4]


def test_it_is_the_same_every_time(page, tiny, synthetic):
    assert (
        render(read_experiment(tiny, control="grpo_bf16"), dict.fromkeys(synthetic.ARMS, "what <it> does"), tiny)
        == page
    )


def test_seeds(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("sc", "mine"), (3, 5), steps=12)
    page = render(read_experiment(folder, control="grpo_bf16"), {"sc": "", "mine": ""}, folder)
    assert "Bands: range over 2 seeds" in page and ">Seed</button>" in page and '"low":' in page


def test_a_failed_gate_shows(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("sc",), steps=3)
    path = folder / "smoke" / "sc" / "gate.json"
    gate = json.loads(path.read_text())
    gate |= {"passed": False, "failures": ["k3_kl_max = 0.1, limit max 0.05"]}
    gate["numbers"]["k3_kl_max"] = None
    path.write_text(json.dumps(gate))
    page = render(read_experiment(folder, control="grpo_bf16"), {"sc": ""}, folder)
    assert "✗ Failed" in page and "sc: k3_kl_max = 0.1, limit max 0.05" in page


def test_the_task_by_hand(synthetic, tmp_path):
    """A row a precision from the gate, one of the warm start from the manifest; a file without them shows no row."""
    folder = synthetic.write_experiment(tmp_path / "e", ("sc",), steps=3)
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", task(folder))
    assert cells[6:] == [
        "BF16", "held-out problems", "1.27", "22.9", "–", "62\u00a0%",
        "INT8 + INT4 KV", "held-out problems", "1.28", "23.0", "–", "62\u00a0%",
    ]  # fmt: skip
    path = folder / "model" / "manifest.json"
    warm = {
        "sampled_entropy": 1.31,
        "sampled_response_length": 20.0,
        "sampled_reward": 0.33,
        "answerable_share": 0.65,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"warm_start": warm}))
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", task(folder))
    assert cells[6:12] == ["BF16", "training problems", "1.31", "20.0", "0.330", "65\u00a0%"]
    gate = folder / "precision" / "gate.json"
    gate.write_text(json.dumps(json.loads(gate.read_text()) | {"numbers": {"k3_kl": 0.003}}))
    assert "held-out" not in task(folder) and "training problems" in task(folder)


@pytest.mark.parametrize(
    "name", ["precision/gate.json", "precision/validation.svg", "smoke/sc/gate.json", "dataset/manifest.json",
             "model/manifest.json", "runs/sc/seed0/run.json", "runs/sc/seed0/config.yaml"],
)  # fmt: skip
def test_a_missing_file_is_named(tiny, tmp_path, name):
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: (missing; the report needs it|No such file)"):
        render(read_experiment(folder, ["sc"]), {"sc": ""}, folder)


@pytest.mark.parametrize(
    ("program", "option", "written"),
    [("report.py", "--output", ""), ("figures.py", "--output-dir", "figures/reward.svg")],
)
def test_the_program_needs_no_torch(tiny, tmp_path, program, option, written):
    settings = {"experiment": "tiny", "arms": ["sc"], "seeds": [0], "control": None, "descriptions": {"sc": "x"}}
    settings["figures"] = {"smoothing_steps": 5}
    path = str(PROGRAMS / program)
    start = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({path!r}, run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", start, "--experiment-dir", str(tiny)]
    command += [option, str(tmp_path / "output"), "--settings", json.dumps(settings)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    opening = "<?xml" if written else "<!doctype html>"
    assert (tmp_path / "output" / written).read_text(encoding="utf-8").startswith(opening)
