"""Each row of the rules shows its two cases, in the code and in the documentation."""

from pathlib import Path

import pytest

from score_centering.reward.judge import judge, refusal
from score_centering.reward.rules import RULES

DOCS = Path(__file__).parents[3] / "docs" / "data-and-reward.md"


@pytest.mark.parametrize("rule", RULES, ids=[rule.kind for rule in RULES])
def test_a_rule_refuses_its_case_for_its_own_reason_and_passes_the_neighbour(rule):
    assert refusal(rule.refused.answer, rule.refused.gold) == rule.kind
    assert judge(rule.accepted.answer, rule.accepted.gold)


def test_kinds_are_distinct():
    assert len({rule.kind for rule in RULES}) == len(RULES)


def test_the_documentation_has_the_table_of_the_rules():
    """Printed when it differs, ready to be pasted."""
    rows = ["| kind | refuses | gold | 0 | gold | 1 |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {rule.kind} | {rule.refuses} | {code(rule.refused.gold)} | {code(rule.refused.answer)} "
        f"| {code(rule.accepted.gold)} | {code(rule.accepted.answer)} |"
        for rule in RULES
    ]
    table = "\n".join(rows)
    assert table in DOCS.read_text(encoding="utf-8"), f"\n{table}"


def code(text):
    return "`" + text.replace("|", r"\|") + "`"
