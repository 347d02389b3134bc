import re

import pytest

from score_centering.data import Problem
from score_centering.model.worked import shuffled_sum, worked_solution
from score_centering.settings import UserError
from score_centering.settings.load import parse
from score_centering.settings.model_blocks import Filler, WarmStart

NONE = Filler()
STEP = re.compile(r"(\d+) \+ (\d+) = (\d+)")


def sums(count: int) -> list[Problem]:
    return [
        Problem(f"Sum: {i % 7} + {i % 5} + {i % 3} =", str(i % 7 + i % 5 + i % 3), f"p{i}", "sums")
        for i in range(count)
    ]


def test_two_terms_without_filler_by_hand():
    worked = shuffled_sum(Problem("Sum: 4 + 3 =", "7", "p", "sums"), NONE, 0)
    assert worked in {r"4 + 3 = 7. \boxed{7}", r"3 + 4 = 7. \boxed{7}"}


def test_an_unknown_is_left_out_and_the_recorded_answer_boxed():
    worked = shuffled_sum(Problem("Sum: 4 + 3 + x =", "17", "p", "sums"), NONE, 0)
    assert worked in {r"4 + 3 = 7. \boxed{17}", r"3 + 4 = 7. \boxed{17}"}


def test_every_step_adds_up_and_all_orders_occur():
    first_terms = set()
    for seed in range(60):
        worked = shuffled_sum(Problem("Sum: 1 + 2 + 5 =", "8", "p", "sums"), NONE, seed)
        (a, b, c), (d, e, f) = (tuple(map(int, step)) for step in STEP.findall(worked))
        assert a + b == c == d and d + e == f == 8
        first_terms.add((a, b))
    assert first_terms == {(a, b) for a in (1, 2, 5) for b in (1, 2, 5) if a != b}


def test_filler_words_come_with_their_chances():
    filler = Filler(words=["um"], before_step=0.6, before_answer=0.0)
    problems = sums(400)
    words = sum(shuffled_sum(problem, filler, seed).count("um") for seed, problem in enumerate(problems))
    # A geometric number of words before each of two steps: mean 0.6 / 0.4 = 1.5, deviation sqrt(0.6) / 0.4 = 1.94.
    assert abs(words / (2 * len(problems)) - 1.5) < 4 * 1.94 / (2 * len(problems)) ** 0.5
    answer = Filler(words=["um"], before_answer=0.5)
    assert any(re.search(r"\. um (um )*\\boxed", shuffled_sum(problem, answer, 0)) for problem in problems)


def test_equal_arguments_give_equal_text():
    problem = sums(8)[6]
    filler = Filler(before_step=0.5, before_answer=0.5)
    texts = {shuffled_sum(problem, filler, seed) for seed in (3, 3, 3)}
    assert len(texts) == 1 and len({shuffled_sum(problem, filler, seed) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("prompt", "answer"), [("Sum: 4 - 3 =", "1"), ("Sum: 4 + 3 =", "8"), ("Sum: 4 + y =", "4"), ("Sum: 4 + x =", "4")]
)
def test_what_is_no_such_sum_is_refused(prompt, answer):
    with pytest.raises(UserError, match="problem p1"):
        shuffled_sum(Problem(prompt, answer, "p1", "sums"), NONE, 0)


def test_the_options_choose_the_solution():
    problem = Problem("Sum: 4 + 3 =", "7", "p", "sums")
    assert worked_solution(WarmStart(max_steps=1, solution="answer"))(problem) == r"\boxed{7}"
    assert worked_solution(WarmStart(max_steps=1))(problem) == r"4 + 3 = 7. \boxed{7}"
    options = WarmStart(max_steps=1, solution="shuffled_sum", filler=Filler(words=["um"], before_answer=0.99), seed=1)
    assert "um um" in worked_solution(options)(problem)


def test_filler_without_shuffled_sums_is_refused():
    with pytest.raises(UserError, match="filler goes with solution shuffled_sum, not running_sum"):
        parse(WarmStart, {"max_steps": 1, "filler": {}})
