"""The jobs that each target of the README plans, file by file, against the graphs in `golden/`.

`make golden` writes them again after a change of the rules; read the difference before committing it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dag

GOLDEN = Path(__file__).parent / "golden"
README = Path(__file__).parents[2] / "README.md"
MERMAID = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
WRITE = "WRITE_GOLDEN" in os.environ


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all", []),
        ("sc_tis", ["sc_tis"]),
        ("b200", ["all", "--configfile", "config/b200.yaml"]),
    ],
)
def test_target_plans_its_golden_graph(fresh, graph_of, name, arguments):
    planned = graph_of(fresh.plan(*arguments))
    golden = GOLDEN / f"{name}.txt"
    if WRITE:
        golden.write_text(planned)
    assert planned == golden.read_text()


def test_a_plan_imports_no_torch(fresh, tmp_path):
    """A torch that ends its importer at once lies before the real one, so that no `except` hides an import of it."""
    (tmp_path / "torch.py").write_text("import os\nos._exit(97)\n", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=False).returncode == 97
    planned = fresh.snakemake("--dry-run", "all", PYTHONPATH=path)
    assert planned.returncode == 0 and "train_sc_tis" in planned.stdout, planned.stdout


def test_figures_need_every_run_but_no_report(fresh):
    jobs = fresh.jobs("figures")
    assert jobs["figures"] == 1
    assert sum(count for rule, count in jobs.items() if rule.startswith("train_")) == 6
    assert jobs["report"] == jobs["all"] == 0


def test_audit_starts_nothing_else(fresh):
    assert fresh.jobs("audit") == {"audit": 1}


def test_a_given_quantised_model_is_validated_and_not_built(fresh):
    given = fresh.folder / "given.json"
    given.write_text("{}")
    arguments = ["--config", "actor_rollout_ref={rollout: {quantization_config_file: given.json}}"]
    plan = fresh.plan("all", *arguments)
    assert "rule validate:" in plan
    assert "rule quantise:" not in plan


def test_readme_shows_the_current_graph(fresh):
    rules = simplified(fresh.snakemake("--rulegraph", "mermaid-js").stdout)
    text = README.read_text()
    if WRITE:
        README.write_text(MERMAID.sub(lambda _: rules, text, count=1))
    assert MERMAID.search(README.read_text())[0] == rules


def simplified(mermaid: str) -> str:
    """Snakemake's rule graph as mermaid text without colours, ids and edges that a longer path implies."""
    names = dict(re.findall(r"^\s*(id\d+)\[(\w+)\]", mermaid, re.MULTILINE))
    edges = {(names[a], names[b]) for a, b in re.findall(r"^\s*(id\d+) --> (id\d+)", mermaid, re.MULTILINE)}
    following = {name: {b for a, b in edges if a == name} for name in names.values()}

    def reached(name: str) -> set[str]:
        return set().union(*({after} | reached(after) for after in following[name]))

    kept = [(a, b) for a, b in edges if not any(b in reached(other) for other in following[a] - {b})]
    return "flowchart LR\n" + "".join(f"    {a} --> {b}\n" for a, b in sorted(kept))
