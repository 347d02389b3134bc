import ast
import re
from pathlib import Path

import pytest

from score_centering.figures.plots import FIGURES

WORKFLOW = Path(__file__).parents[3] / "workflow"


@pytest.mark.parametrize("name", [*FIGURES, "summary", "report"])
def test_each_figure_has_a_caption(name):
    assert (WORKFLOW / "report" / f"{name}.rst").read_text(encoding="utf-8").startswith("**")


def test_the_rule_promises_every_figure():
    listed = re.search(r"^FIGURES = (\{.*?\})", (WORKFLOW / "rules" / "figures.smk").read_text(), re.M | re.S).group(1)
    assert list(ast.literal_eval(listed)) == list(FIGURES)
