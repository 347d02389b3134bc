import re

import pytest

from score_centering.data.problems import Problem
from score_centering.data.source import open_source
from score_centering.data.sums import answerable_share, is_answerable, open_sums
from score_centering.settings import UserError
from score_centering.settings.dataset_blocks import Sums
from score_centering.settings.load import parse

SUM = re.compile(r"Sum: (\d(?: \+ \d){2,3})( \+ x)? =")
BLOCK = {"size": 2000, "min_terms": 3, "max_terms": 4, "max_term": 9, "unanswerable_share": 0.35}


def test_answers_are_the_sums_and_the_asked_share_has_an_unknown():
    source = open_sums(**BLOCK, seed=1)
    rows = list(source.rows)
    known, unknown = [], {}
    for row in rows:
        terms, x = SUM.fullmatch(row.prompt).groups()
        if x:
            assert unknown.setdefault(row.prompt, row.answer) == row.answer  # else the two rows would both be dropped
        else:
            known.append(row)
            assert int(row.answer) == sum(map(int, terms.split(" + ")))
    # 3 standard deviations of a binomial share: 0.35 ± 0.032
    assert abs(1 - len(known) / len(rows) - 0.35) < 0.032
    guesses = [int(answer) for answer in unknown.values()]
    assert min(guesses) >= 0 and max(guesses) < 36 and len(set(guesses)) == 36
    assert source.pin == {"kind": "sums", **BLOCK, "seed": 1} and source.name == "sums"


def test_equal_arguments_give_equal_rows_and_another_seed_others():
    first, again, other = (list(open_source("sums", BLOCK, seed).rows) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("most", [2, 6])
def test_guesses_lie_below_the_largest_sum_of_the_terms_that_are_asked(most):
    """Two terms of 0 to 9 sum to 18 at most, six to 54: every number below that is drawn, and none above."""
    guesses = {int(row.answer) for row in open_sums(4000, 2, most, 9, 1.0, 0).rows}
    assert guesses <= set(range(9 * most)) and len(guesses) > 0.9 * 9 * most


@pytest.mark.parametrize(("share", "answerable"), [(0.0, True), (1.0, False)])
def test_the_ends_of_the_share(share, answerable):
    rows = open_sums(50, 2, 2, 3, share, 0).rows
    assert {is_answerable(Problem(row.prompt, row.answer, "p", "sums")) for row in rows} == {answerable}


def test_a_problem_of_another_source_counts_as_answerable():
    assert is_answerable(Problem("Solve x + 1 = 2", "1", "p", "hub"))


def test_terms_out_of_order_are_refused():
    with pytest.raises(UserError, match="min_terms = 4 exceeds max_terms = 3"):
        parse(Sums, {"size": 10, "min_terms": 4, "max_terms": 3})


def test_the_answerable_share_by_hand():
    known, unknown = Problem("Sum: 1 + 2 =", "3", "a", "sums"), Problem("Sum: 1 + 2 + x =", "9", "b", "sums")
    assert answerable_share([known, known, unknown, known]) == 0.75
    assert answerable_share([Problem("Solve x + 1 = 2", "1", "p", "hub")]) == 1
