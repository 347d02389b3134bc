"""The text of an answer: which box counts, and what one spelling makes of it. No math_verify here."""

import time

import pytest

from score_centering.reward import final_answer
from score_centering.reward.answers import MAX_ANSWER_CHARS
from score_centering.reward.literals import literals_equal
from score_centering.reward.spelling import one_spelling


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{5}.", "5"),
        (r"\boxed{4}, no, \boxed{5}", "5"),
        (r"\boxed{5} because \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"$\boxed{x = \boxed{5}}$", "x = 5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\\boxed{5}", "5"),
        ("\\boxed{\n5\n}", "5"),
        (r"The \boxed notation: \boxed{5}, I used \boxed.", "5"),
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"\boxed{4}</think> The answer is \boxed{5}", "5"),
    ],
)
def test_the_last_box_of_the_final_answer_counts(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "5",
        "The answer is 5",
        r"\boxed{}",
        r"\boxed{ }",
        r"\boxed{5",
        r"\boxed{5} and then \boxed{6",
        r"\boxed{5\}",
        r"boxed{5}",
        r"\boxedanswer{5}",
        r"\boxed 5",
        r"\boxed{5}</think>",
        r"<think>\boxed{5}</think> The answer is 5",
        r"<think> I think \boxed{5}",
        r"</think><think>\boxed{5}",
        "\\boxed{" + "1" * (MAX_ANSWER_CHARS + 1) + "}",
    ],
)
def test_a_response_without_a_closed_last_box_after_the_thinking_has_no_answer(response):
    assert final_answer(response) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5}", None),
        (r"I think \boxed{5}, or \boxed{6}.", None),
        (r"I think \boxed{5}</think>", None),
        (r"I think \boxed{5}</think> It is \boxed{6}.", "6"),
        (r"</think>\boxed{6}", "6"),
        (r"</think>\boxed{6}<think>\boxed{7}", None),
        (r"<think>\boxed{5}", None),
    ],
)
def test_a_box_in_the_thinking_that_the_prompt_opened_is_no_answer(response, answer):
    assert final_answer(response, thinking=True) == answer


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("−5", "-5"),
        ("–5", "-5"),
        ("１２", "12"),
        ("١٢", "12"),
        ("x²", "x^{2}"),
        ("10⁻³", "10^{-3}"),
        ("1.5e-3", r"1.5\times 10^{-3}"),
        ("2E+10", r"2\times 10^{10}"),
        ("12 345", "12345"),
        (r"12\,345\,678", "12345678"),
        ("1{,}234", "1234"),
        ("1 23", "1 23"),
        ("5.", "5"),
        ("5\u00a0cm", "5 cm"),
        ("3 1/2", r"3\frac{1}{2}"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"0.\overline{9}", "1"),
        ("½", r"\frac{1}{2}"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\left(1,2\right)", "(1,2)"),
        ("5\u200b", "5"),
    ],
)
def test_one_spelling(text, spelled):
    assert one_spelling(text) == spelled


HOSTILE = [
    "1",
    "1 ",
    " 234",
    "1,234",
    "1e",
    "e1",
    ".",
    "1.",
    r"\bm{",
    r"\color{",
    "\\",
    "{",
    "}",
    "1/",
    "1 1/",
    "²",
    "٣",
    "\x00",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_the_longest_hostile_text_takes_milliseconds(unit):
    """What runs in the trainer's own process has no deadline, so nothing in it may be quadratic."""
    text = (unit * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
    start = time.process_time()
    spelled = one_spelling(text)
    literals_equal(spelled, spelled)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "response",
    [r"\boxed{", r"\boxed{1}", "{", "}", r"\boxed ", " ", "\\", "\x00", "<think>"],
)
def test_a_response_of_1_mb_takes_well_under_a_deadline(response):
    start = time.process_time()
    final_answer(r"\boxed{" + (response * 10**6)[: 10**6])
    assert time.process_time() - start < 3.0


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("5", "5", True),
        ("-5", "5", False),
        ("007", "7", True),
        ("-0", "0", True),
        ("1" * 9000, "1" * 9000, True),
        ("1" * 9000, "1" * 8999 + "2", False),
        ("1,234", "1234", True),
        ("0.50", r"\frac{1}{2}", True),
        ("1/2", r"\frac{2}{4}", True),
        ("0.3", r"\frac{1}{3}", False),
        ("0.33333333", r"\frac{1}{3}", True),
        ("0.33333334", r"\frac{1}{3}", True),
        ("0.33333335", r"\frac{1}{3}", False),
        ("0.333333", r"\frac{1}{3}", True),
        ("0.33333", r"\frac{1}{3}", False),
        ("0.33333333", "0.33333334", False),
        ("8/2", "4", False),
        ("3/4", "6/8", True),
        (r"3\frac{1}{2}", "3.5", True),
        (r"-(\frac{1}{2})", r"\frac{-1}{2}", True),
        ("1.6e-19", r"1.6\times 10^{-19}", None),
        (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}", False),
        (r"10^{20}", "1" + "0" * 20, True),
        ("10, 100", "10,100", None),
        ("(1,234)", "1234", None),
        ("2 3", "23", None),
        ("1/0", "1", None),
        ("5 cm", "5", None),
        ("", "5", None),
    ],
)
def test_written_out_numbers_are_compared_exactly_or_left_to_the_judge(answer, gold, equal):
    assert literals_equal(answer, gold) is equal


def test_the_thinking_ends_where_it_is_closed_last():
    assert final_answer(r"so</think> \boxed{1}, no: again</think> it is 2") is None
    assert final_answer(r"so</think> \boxed{1}, no: again</think> \boxed{2}", thinking=True) == "2"
