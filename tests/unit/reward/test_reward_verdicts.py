"""The table of verdicts: `cases.tsv`, shapes of answers in MATH, GSM8K, AIME and INTELLECT-style data.

Columns: `right` (what a careful grader says; `error`: the gold answer is none), `reward` (what training gets), `rule`
(the kind of the rule that refuses it), `math_verify` (what the library alone says of the two boxes), `why` (wherever
right, reward and math_verify are not the same, and for every case that shows a fact).
"""

import csv
from pathlib import Path

import pytest
from latex2sympy2_extended import latex2sympy2
from math_verify import parse, verify

from score_centering.reward import grammar
from score_centering.reward.judge import UnparsableGoldError, is_gold, judge, refusal
from score_centering.reward.spelling import one_spelling

with Path(__file__).with_name("cases.tsv").open(encoding="utf-8") as _file:
    CASES = list(csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))


def verdict(answer, gold):
    """(reward, rule) as the table has them."""
    try:
        kind = refusal(answer, gold)
    except UnparsableGoldError:
        return "error", ""
    return ("1", "") if kind is None else ("0", kind)


def raw(answer, gold):
    golds, answers = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return str(int(verify(golds, answers, timeout_seconds=None)))


@pytest.mark.parametrize("case", CASES, ids=[f"{case['gold']} ? {case['answer']}" for case in CASES])
def test_the_reward_of_each_case(case):
    assert verdict(case["answer"], case["gold"]) == (case["reward"], case["rule"])


def test_the_table_is_large_and_no_wrong_answer_is_rewarded():
    assert len(CASES) >= 800
    assert len({(case["gold"], case["answer"]) for case in CASES}) == len(CASES)
    assert [case for case in CASES if case["reward"] == "1" and case["right"] != "1"] == []


def test_the_documentation_counts_the_cases():
    text = (Path(__file__).parents[3] / "docs" / "data-and-reward.md").read_text(encoding="utf-8")
    assert f"`tests/unit/reward/cases.tsv` has {len(CASES)} cases" in text


def test_the_table_says_where_math_verify_is_wrong_and_why_the_reward_differs():
    for case in CASES:
        differs = case["reward"] != case["right"] or case["math_verify"] != case["right"].replace("error", "0")
        assert case["why"] or not differs, case
    wrong = [case for case in CASES if case["math_verify"] != case["right"].replace("error", "0")]
    assert [case for case in wrong if raw(case["answer"], case["gold"]) != case["math_verify"]] == []


def test_every_rewarded_gold_is_a_gold_and_no_other_is():
    golds = {case["gold"]: case["right"] != "error" for case in CASES}
    assert {gold: is_gold(gold) for gold in golds} == golds


def test_two_stage_parsing_reads_every_case_as_full_parsing_does(monkeypatch):
    texts = sorted({one_spelling(case[side]) for case in CASES for side in ("gold", "answer")})[::3]
    two_stage = [_tree(text) for text in texts]
    assert latex2sympy2.PSParser is grammar.TwoStageParser
    monkeypatch.setattr(latex2sympy2, "PSParser", grammar.TwoStageParser.__mro__[1])
    assert [_tree(text) for text in texts] == two_stage


def _tree(text):
    try:
        return repr(latex2sympy2.latex2sympy(text, is_real=True))
    except Exception as error:  # the grammar raises bare exceptions
        return type(error).__name__


def test_an_unreadable_gold_is_an_error_whatever_the_answer():
    for gold in ("", "  ", r"\frac{", "5\x00", "x" * 1001, "(" * 30 + "x" + ")" * 30):
        with pytest.raises(UnparsableGoldError, match="is no math that an answer could be compared with"):
            judge(r"x", gold)
        assert not is_gold(gold)
