"""Properties that hold for every answer of a kind. What is right is known from exact arithmetic, not from the judge."""

import math
import time
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from score_centering.reward import Scorer
from score_centering.reward.judge import judge
from score_centering.reward.literals import literals_equal
from score_centering.reward.spelling import one_spelling
from score_centering.reward.units import UNITS

quick = settings(deadline=None, max_examples=60, derandomize=True)

# -------------------------------------------------------------------------------------------------------------- numbers
integers = st.integers(1, 10**12).map(Fraction)
decimals = st.builds(lambda n, places: Fraction(n, 10**places), st.integers(1, 10**9), st.integers(1, 12))
fractions = st.builds(Fraction, st.integers(1, 10**6), st.integers(1, 10**6))
numbers = st.one_of(integers, decimals, fractions)


def as_fraction(value):
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def as_decimal(value, places=40):
    """`value` cut after `places` digits."""
    whole, rest = divmod(int(abs(value) * 10**places), 10**places)
    return f"{'-' * (value < 0)}{whole}.{rest:0{places}}"


def as_power(value):
    """Mantissa and exponent, exact where the value is a decimal of at most 40 digits."""
    exponent = math.floor(math.log10(value))
    return rf"{as_decimal(value / Fraction(10) ** exponent)}\times 10^{{{exponent}}}"


def wrapped(form, text):
    return {
        "alone": text,
        "pair": f"(1,{text})",
        "set": rf"\{{0,{text}\}}",
        "interval": f"[-1,{text})",
        "equation": f"x={text}",
        "unit": rf"{text}\text{{ cm}}",
        "root": rf"{text}\sqrt{{2}}",
        "line": f"y={text}x",
    }[form]


FORMS = ["alone", "pair", "set", "interval", "equation", "unit", "root", "line"]
spellings = st.sampled_from([as_fraction, as_decimal, as_power])


@quick
@given(value=numbers, form=st.sampled_from(FORMS), gold=spellings, answer=spellings, up=st.booleans())
@example(value=Fraction(1, 10**30), form="pair", gold=as_power, answer=as_power, up=True)
def test_a_number_off_by_a_thousandth_is_never_right(value, form, gold, answer, up):
    off = value * (1 + Fraction(1 if up else -1, 1000))
    assert not judge(wrapped(form, answer(off)), wrapped(form, gold(value)))


@quick
@given(first=numbers, second=numbers, same=st.booleans(), one=spellings, other=spellings)
def test_the_short_cut_in_the_trainers_process_is_the_full_verdict(first, second, same, one, other):
    answer, gold = one_spelling(one(first if same else second)), one_spelling(other(first))
    equal = literals_equal(answer, gold)
    assert equal is not None and equal == judge(answer, gold) == judge(f"({answer},1)", f"({gold},1)")


@quick
@given(value=decimals, gold=spellings, answer=spellings, form=st.sampled_from(FORMS))
def test_a_number_is_right_in_every_spelling(value, gold, answer, form):
    assume(value.denominator > 1)  # a gold integer asks for an integer
    assert judge(wrapped(form, answer(value)), wrapped(form, gold(value)))


# ---------------------------------------------------------------------------------------------------------- expressions
# q + r·√n with n square-free: two of them are equal only where all three are.
surds = st.tuples(fractions, st.integers(-50, 50).filter(bool).map(Fraction), st.sampled_from([2, 3, 5, 6, 7, 10, 11]))


def as_surd(surd):
    rational, factor, radicand = surd
    return rf"{as_fraction(rational)}{'+' if factor > 0 else '-'}{abs(factor)}\sqrt{{{radicand}}}"


@quick
@given(first=surds, second=surds)
def test_distinct_surds_are_different(first, second):
    assume(first != second)
    assert not judge(as_surd(first), as_surd(second))
    assert judge(as_surd(first), as_surd(first))


# (k·b^n + j) / m: integers of any size, told apart by Python's own.
powers = st.tuples(
    st.integers(1, 9), st.sampled_from([2, 3, 7]), st.integers(20, 400), st.integers(-3, 3), st.integers(1, 9)
)


def as_text(power):
    k, base, exponent, rest, over = power
    return rf"\frac{{{k}\cdot {base}^{{{exponent}}}{rest:+}}}{{{over}}}"


def as_value(power):
    k, base, exponent, rest, over = power
    return Fraction(k * base**exponent + rest, over)


@quick
@given(first=powers, near=st.integers(-2, 2).filter(bool), inverse=st.booleans())
def test_near_powers_are_different_however_large_or_small(first, near, inverse):
    second = (*first[:3], first[3] + near, first[4])
    texts = [as_text(power) for power in (first, second)]
    assert as_value(first) != as_value(second)
    if inverse:
        texts = [rf"3-\frac{{1}}{{{text}}}" for text in texts]
    assert not judge(*texts)


polynomials = st.lists(st.integers(-9, 9), min_size=2, max_size=4).filter(lambda c: c[-1] != 0)


def as_polynomial(coefficients):
    terms = [f"{c:+}" if n == 0 else f"{c:+}x^{{{n}}}" for n, c in enumerate(coefficients) if c]
    return "".join(reversed(terms)).removeprefix("+")


@quick
@given(first=polynomials, second=polynomials)
def test_polynomials_are_equal_only_with_the_same_coefficients(first, second):
    assert judge(as_polynomial(first), as_polynomial(second)) == (first == second)


# ----------------------------------------------------------------------------------------------------------- structures
elements = ["1", "-2", "120", "0.5", r"\frac{1}{3}", r"\sqrt{2}", r"\pi", "x+1", "2024"]
items = st.lists(st.sampled_from(elements), min_size=2, max_size=5, unique=True)


@quick
@given(elements=items, data=st.data())
def test_a_permuted_set_is_right_and_a_permuted_tuple_is_wrong(elements, data):
    permuted = data.draw(st.permutations(elements))
    assert judge(rf"\{{{','.join(permuted)}\}}", rf"\{{{','.join(elements)}\}}")
    assert judge(", ".join(permuted), ", ".join(elements))
    assert judge(f"({','.join(permuted)})", f"({','.join(elements)})") == (permuted == elements)


@quick
@given(elements=items, data=st.data())
def test_a_set_with_another_element_is_wrong(elements, data):
    index = data.draw(st.integers(0, len(elements) - 1))
    changed = [*elements[:index], "77", *elements[index + 1 :]]
    assert not judge(rf"\{{{','.join(changed)}\}}", rf"\{{{','.join(elements)}\}}")
    assert not judge(rf"\{{{','.join([*elements, '77'])}\}}", rf"\{{{','.join(elements)}\}}")


# ---------------------------------------------------------------------------------------------------------------- units
UNIT_NAMES = [(row.name, spelling) for row in UNITS for spelling in row.spellings.split()]
COMMANDS = ["text", "mathrm", "textit", "textbf", "mbox"]
values = st.sampled_from(["5", "2.5", r"\frac{3}{4}", r"2\sqrt{3}", r"12\pi", r"3\times 10^{8}"])


@pytest.mark.parametrize(("_", "spelling"), UNIT_NAMES)
def test_a_unit_may_stand_on_either_side_alone(_, spelling):
    for command in COMMANDS:
        text = rf"7\{command}{{ {spelling}}}"
        assert judge(text, "7") and judge("7", text) and judge(text, text)
        assert not judge(text, "8")


@quick
@given(value=values, first=st.sampled_from(UNIT_NAMES), second=st.sampled_from(UNIT_NAMES), over=st.booleans())
def test_two_units_are_right_only_where_they_are_the_same(value, first, second, over):
    texts = [rf"{value}\text{{ {'m/' * over}{spelling}}}" for _, spelling in (first, second)]
    assume(not over or all("." not in spelling and name != "m" for name, spelling in (first, second)))
    assert judge(*texts) == (first[0] == second[0])


@quick
@given(value=values, words=st.lists(st.sampled_from(["or", "more", "plus", "about", "zorp", "than"]), min_size=1))
def test_words_that_are_no_unit_are_wrong(value, words):
    assert not judge(rf"{value}\text{{ {' '.join(words)}}}", value)


# ----------------------------------------------------------------------------------------------------- any LaTeX at all
atoms = st.sampled_from(
    [
        "1",
        "2",
        "x",
        "y",
        "10",
        "0.5",
        r"\pi",
        r"\infty",
        "e",
        "i",
        r"\alpha",
        r"\text{ cm}",
        r"^\circ",
        r"\%",
        r"\$",
        "!",
    ]
)
latex = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(r"\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds(r"\sqrt{{{}}}".format, inner),
        st.builds("({},{})".format, inner, inner),
        st.builds(r"\{{{},{}\}}".format, inner, inner),
        st.builds("{}^{{{}}}".format, inner, st.sampled_from(["2", "-1", "x", r"\circ", "1/2"])),
        st.builds("{}_{{{}}}".format, inner, inner),
        st.builds("{}{}{}".format, inner, st.sampled_from([*"+-*/=<>,;:|.'~ ", r"\pm", r"\le", r"\in"]), inner),
        st.builds(
            r"\{} {}".format, st.sampled_from(["sin", "ln", "log_2", "cos", "left(", "text{or}", "approx"]), inner
        ),
        st.builds(r"\begin{{pmatrix}}{}&{}\\{}&1\end{{pmatrix}}".format, inner, inner, inner),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(answers=st.lists(latex, min_size=20, max_size=20))
def test_generated_latex_neither_hangs_nor_crashes_the_scorer(scorer, answers):
    golds = ["x+1", r"\{1,2\}", "(1,2)", r"\frac{1}{2}\text{ cm}", "y=2x", r"2\sqrt{3}", "5", r"\text{no}"]
    responses = [rf"\boxed{{{answer}}}" for answer in answers for _ in golds]
    start = time.monotonic()
    result = scorer.score(responses, golds * len(answers), *([[False] * len(responses)] * 2))
    assert set(result.rewards.tolist()) <= {0.0, 1.0}
    assert (result.errors, result.timeouts) == (0, 0)
    assert time.monotonic() - start < 120


@pytest.fixture(scope="module")
def scorer():
    with Scorer(workers=1, timeout_s=10.0) as running:
        yield running
