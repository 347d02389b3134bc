"""The answer of a row: what counts as one, and under which reason each other row is dropped."""

import json

import pytest

from score_centering.data.source_answers import answer_of_value, answer_of_verification_info


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"ground_truth": "42"}', "42"),
        ('{"ground_truth": " \\\\frac{1}{2} "}', r"\frac{1}{2}"),
        ('{"ground_truth": 42}', "42"),
        ('{"ground_truth": -0.10}', "-0.10"),
        ('{"ground_truth": 1e20}', "1e20"),
        ('{"ground_truth": 100000000000000000000000001}', "100000000000000000000000001"),
        ('{"ground_truth": ["7"]}', "7"),
        ('{"ground_truth": ["1", 2, "x"]}', "1, 2, x"),
        ('{"ground_truth": ["5", "5"]}', "5"),
        ('{"ground_truth": "−5", "other": null}', "−5"),
    ],
)
def test_verification_info_gives_the_answer_as_it_is_written(text, answer):
    assert answer_of_verification_info(text) == (answer, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "missing_verification_info"),
        ("", "missing_verification_info"),
        ("{", "malformed_verification_info"),
        ("not json", "malformed_verification_info"),
        ('["5"]', "malformed_verification_info"),
        ('"5"', "malformed_verification_info"),
        (5, "malformed_verification_info"),
        ("[" * 100_000, "malformed_verification_info"),
        ('{"ground_truth": NaN}', "malformed_verification_info"),
        ('{"ground_truth": Infinity}', "malformed_verification_info"),
        ("{}", "missing_answer"),
        ('{"answer": "5"}', "missing_answer"),
        ('{"ground_truth": null}', "null_answer"),
        ('{"ground_truth": ""}', "empty_answer"),
        ('{"ground_truth": " \\n "}', "empty_answer"),
        ('{"ground_truth": []}', "empty_answer"),
        ('{"ground_truth": [""]}', "empty_answer"),
        ('{"ground_truth": true}', "malformed_answer"),
        ('{"ground_truth": {"value": 5}}', "malformed_answer"),
        ('{"ground_truth": [["5"]]}', "malformed_answer"),
        ('{"ground_truth": ["5", null]}', "malformed_answer"),
        ('{"ground_truth": ["5", ""]}', "malformed_answer"),
    ],
)
def test_every_row_without_an_answer_has_one_reason(text, reason):
    assert answer_of_verification_info(text) == (None, reason)


def test_a_number_of_a_column_is_written_out():
    assert answer_of_value(5) == ("5", None)
    assert answer_of_value(0.5) == ("0.5", None)
    assert answer_of_value(float("nan")) == (None, "malformed_answer")
    assert answer_of_value(float("-inf")) == (None, "malformed_answer")
    assert answer_of_value(json.loads("[1, 2]")) == ("1, 2", None)
