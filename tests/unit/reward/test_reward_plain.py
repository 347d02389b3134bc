"""The recogniser of plain math: whatever it accepts, math_verify reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.reward.judge import is_gold
from score_centering.reward.plain import is_plain_math


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{3}{4}",
        r"\dfrac{1+\sqrt{5}}{2}",
        r"2\sqrt{3}",
        r"12\pi",
        "(1,2)",
        r"[3,\infty)",
        r"(-\infty, 3]",
        r"\{1,2,3\}",
        "1, 2",
        "x^2+3x-5",
        "y=2x+1",
        "(x-1)(x+1)",
        r"\frac{n(n+1)}{2}",
        r"\left(\frac{1}{2},3\right)",
        "2^{n+1}",
    ],
)
def test_common_shapes_are_recognised_and_read(text):
    assert is_plain_math(text)
    assert is_gold(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        r"\frac{1}{0}",
        "2 3",
        "x^",
        "x^{2}^{3}",
        "(1,2",
        "1..2",
        "--x",
        "x+",
        r"\text{Monday}",
        "5%",
        "a=b=c",
        "x" * 90,
    ],
)
def test_what_is_not_certain_is_left_to_the_parser(text):
    assert not is_plain_math(text)


factors = st.sampled_from(["2", "13", "0.5", "x", "n", "k", r"\pi"])
sums = st.recursive(
    factors,
    lambda inner: st.one_of(
        st.builds(r"\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds(r"\sqrt{{{}}}".format, inner),
        st.builds("({}+{})".format, inner, inner),
        st.builds("({})^{{{}}}".format, inner, factors),
        st.builds("{}-{}".format, inner, inner),
        st.builds("{}({})".format, factors, inner),
    ),
    max_leaves=4,
)
answers = st.one_of(
    sums, st.builds("({},{})".format, sums, sums), st.builds("y={}".format, sums), st.builds("{},{}".format, sums, sums)
)


@settings(deadline=None, max_examples=40)
@given(text=answers)
def test_whatever_is_recognised_is_read(text):
    assert not is_plain_math(text) or is_gold(text)
