"""Dropping, counting and splitting: whatever the order of the rows, the same files to the byte."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.data import Problem, RawProblem, Source, normalise_prompt, prepare, write_dataset
from score_centering.settings import UserError


def source_of(rows):
    return Source(name="test", rows=rows, pin={"kind": "test"}, files={})


def all_parsable(answers):
    return [True] * len(answers)


def prepared(rows, **options):
    options = {"val_size": 1, "seed": 42, "parsable": all_parsable, **options}
    return prepare(source_of(rows), **options)


def numbered(count):
    return [RawProblem(prompt=f"What is {index} + 1?", answer=str(index + 1)) for index in range(count)]


def test_reasons_and_rows_add_up():
    rows = [
        *numbered(40),
        RawProblem(None, "1"),
        RawProblem("  \n", "1"),
        RawProblem("bad \ud800", "1"),
        RawProblem("p", "\udfff"),
        RawProblem("q", None, "null_answer"),
        RawProblem("what IS\n0 +  1?", "1"),
        RawProblem("Twice?", "1"),
        RawProblem("twice?", "2"),
        RawProblem("Text?", "no math"),
    ]
    result = prepared(rows, parsable=lambda answers: [answer != "no math" for answer in answers], train_size=30)
    assert result.dropped == {
        "conflicting_answers": 1,
        "duplicate": 2,
        "malformed_answer": 1,
        "malformed_prompt": 1,
        "missing_prompt": 2,
        "null_answer": 1,
        "over_train_size": 9,
        "unparsable_answer": 1,
    }
    assert result.rows_read == len(rows) == sum(result.dropped.values()) + len(result.train) + len(result.test)
    assert (len(result.train), len(result.test)) == (30, 1)


def test_prompts_with_two_answers_are_dropped_altogether():
    rows = [*numbered(3), RawProblem("A?", "1"), RawProblem("a?", "2"), RawProblem("a?", "1")]
    result = prepared(rows)
    assert "a?" not in {problem.prompt.lower() for problem in result.train + result.test}
    assert result.dropped == {"conflicting_answers": 1, "duplicate": 2}


def test_answers_that_are_no_math_are_an_error_when_they_are_many():
    with pytest.raises(UserError, match=r"test: 1 of 11 answers are no math .* \(allowed: 5%\), e.g. 'soon'"):
        prepared(
            [*numbered(10), RawProblem("When?", "soon")],
            parsable=lambda answers: [answer != "soon" for answer in answers],
        )


def test_too_few_problems_are_an_error_that_says_what_was_dropped():
    with pytest.raises(UserError, match=r"dataset.val_size: 5 leaves no training problem of the 5 .*'null_answer': 1"):
        prepared([*numbered(5), RawProblem("q", None, "null_answer")], val_size=5)


@pytest.mark.parametrize(
    ("low", "high", "kept", "reasons"),
    [
        (None, None, 4, {}),
        (0.2, None, 2, {"solve_rate_below_min": 1, "solve_rate_missing": 1}),
        (None, 0.5, 2, {"solve_rate_above_max": 1, "solve_rate_missing": 1}),
        (0.1, 0.9, 3, {"solve_rate_missing": 1}),
        (0.2, 0.5, 1, {"solve_rate_above_max": 1, "solve_rate_below_min": 1, "solve_rate_missing": 1}),
    ],
)
def test_filter_by_solve_rate(low, high, kept, reasons):
    rows = [RawProblem(f"p{rate}", "1", solve_rate=rate) for rate in (0.1, 0.5, 0.9)]
    rows += [RawProblem("p", "1", solve_rate=None)]
    rows += [RawProblem(f"q{index}", "1", solve_rate=0.3) for index in range(3)]
    result = prepared(rows, min_solve_rate=low, max_solve_rate=high)
    assert (len(result.train) + len(result.test) - 3, result.dropped) == (kept, reasons)


def test_a_solve_rate_that_is_not_a_number_is_missing():
    rows = [*(row._replace(solve_rate=0.5) for row in numbered(3)), RawProblem("p", "1", solve_rate=float("nan"))]
    assert prepared(rows, min_solve_rate=0.1).dropped == {"solve_rate_missing": 1}


prompts = st.text(alphabet="aA bB\n\t\u00a0１1²", max_size=6)
rows_strategy = st.lists(
    st.builds(
        RawProblem,
        prompt=prompts,
        answer=st.sampled_from(["1", "2", " 3"]),
        fault=st.sampled_from([None, None, None, "null_answer"]),
        id=st.none() | st.sampled_from(["x", "y"]),
        solve_rate=st.none(),
    ),
    min_size=8,
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(rows=rows_strategy, order=st.randoms(use_true_random=False), seed=st.integers(-5, 5))
def test_splits_are_disjoint_complete_and_independent_of_the_order_of_rows(rows, order, seed):
    try:
        first = prepared(rows, val_size=2, seed=seed)
    except UserError:
        return
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert prepared(shuffled, val_size=2, seed=seed) == first
    keys = [normalise_prompt(problem.prompt) for problem in first.train + first.test]
    assert len(set(keys)) == len(keys)
    assert len(keys) + sum(first.dropped.values()) == len(rows)


def test_a_larger_dataset_keeps_its_order_and_only_the_seed_moves_problems():
    rows = numbered(200)
    base = prepared(rows, val_size=50, seed=42)
    other = prepared(rows, val_size=50, seed=43)
    fewer = prepared(rows[:150], val_size=50, seed=42)
    assert base.test != other.test
    assert [problem for problem in base.train + base.test if problem in fewer.train + fewer.test] != []
    order = [problem.prompt for problem in base.test + base.train]
    kept = {problem.prompt for problem in fewer.test + fewer.train}
    assert [prompt for prompt in order if prompt in kept] == [p.prompt for p in fewer.test + fewer.train]


def test_files_are_byte_identical_on_every_run(tmp_path):
    rows = numbered(300)
    split = {"seed": 42, "val_size": 20}
    for index in range(3):
        random.Random(index).shuffle(rows)
        source = source_of(list(rows))
        write_dataset(
            prepare(source, val_size=20, seed=42, parsable=all_parsable), source, tmp_path / str(index), split
        )
    names = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert names == ["manifest.json", "test.parquet", "train.parquet"]
    for name in names:
        contents = {(tmp_path / str(index) / name).read_bytes() for index in range(3)}
        assert len(contents) == 1, name


def test_ids_come_from_the_source_or_from_the_prompt():
    result = prepared([RawProblem("A?", "1", id="7"), RawProblem("B?", "1"), RawProblem("C?", "1")])
    by_prompt = {problem.prompt: problem for problem in result.train + result.test}
    assert by_prompt["A?"] == Problem("A?", "1", "7", "test")
    assert len(by_prompt["B?"].id) == 16
    assert by_prompt["B?"].id != by_prompt["C?"].id


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_rows_of_one_problem_the_smaller_id_stays(order):
    twice = [RawProblem("A  problem?", "1", id="b"), RawProblem("a problem?", "1", id="a")]
    result = prepared([*numbered(3), *(twice[index] for index in order)])
    assert [row.id for row in (*result.train, *result.test) if "problem" in row.prompt] == ["a"]
