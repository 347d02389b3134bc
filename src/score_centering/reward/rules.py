"""What a right answer is, rule by rule: a row says what it refuses, with a case that it refuses and one that passes.

A row looks at two values (`reading.Value`) and says whether it refuses the answer. The rows before `EXPRESSIONS` look
at what is written, those in it at two expressions that math_verify calls equivalent: a reward for a wrong answer
teaches it, while one withheld only slows learning. The first row that applies gives its kind. The tests judge every
row's two cases, and the documentation's table is made of them.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from sympy import (
    Add,
    Basic,
    Derivative,
    Function,
    Integer,
    Integral,
    Limit,
    Mul,
    Pow,
    Product,
    Sum,
    UnevaluatedExpr,
    preorder_traversal,
)
from sympy.core.function import AppliedUndef

from score_centering.reward.expressions import Expression, differ, expression
from score_centering.reward.literals import equal_numbers, unfinished
from score_centering.reward.reading import Value, squeeze
from score_centering.reward.units import TEXT, is_noun


class Case(NamedTuple):
    gold: str
    answer: str


class Rule(NamedTuple):
    """refused: a case that this row refuses. accepted: its nearest neighbour that gets the reward."""

    kind: str
    refuses: str
    refused: Case
    accepted: Case
    applies: Callable[[Value, Value], bool] | None = None  # (answer, gold); None: `judge` decides it on whole answers


# ---------------------------------------------------------------------------------------------------- what is written
def _other_words(answer: Value, gold: Value) -> bool:
    if answer.words != gold.words:
        return bool(answer.words) or not is_noun(gold.words)
    return _text_inside(answer.text) and answer.text != gold.text


def _text_inside(text: str) -> bool:
    return TEXT.search(re.sub(r"_\{?\\text\{[^{}]*\}\}?", "", text)) is not None


def _other_unit(answer: Value, gold: Value) -> bool:
    if (answer.unit and (gold.words or gold.percent)) or (answer.percent and gold.unit):
        return True
    return bool(answer.unit and gold.unit) and answer.unit != gold.unit


def _other_base(answer: Value, gold: Value) -> bool:
    if answer.base is None:
        return False
    if gold.base is None:
        return answer.base[1] != "10"
    return answer.base != gold.base


def _other_clock(answer: Value, gold: Value) -> bool:
    return (answer.is_clock or gold.is_clock) and squeeze(answer.text) != squeeze(gold.text)


def _digits_apart(answer: Value, gold: Value) -> bool:
    return answer.is_apart


_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|[^a-zA-Z])")
_COMMANDS_READ = """
    frac sqrt cdot times div pm mp infty pi binom dbinom tbinom sin cos tan cot sec csc arcsin arccos arctan sinh
    cosh tanh ln log lg exp sum prod int lim to limits circ lfloor rfloor lceil rceil gcd lcm max min mathbb alpha
    beta gamma delta epsilon zeta eta theta lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta
    Lambda Sigma Phi Psi Omega overline vec hat bar overrightarrow mathrm mathcal text emptyset le leq ge geq lt gt
    ne neq in cup cap setminus begin end ell prime quad angle triangle perp parallel operatorname vert lvert rvert
"""
_READ = {rf"\{name}" for name in _COMMANDS_READ.split()} | {r"\{", r"\}", "\\\\", r"\,", r"\;", r"\ ", r"\:"}


_SIGNS = re.compile(r"\.\.|\\[lcd]?dots|[?@#&']")


def _unread(answer: Value, gold: Value) -> bool:
    first, second = (
        set(_COMMAND.findall(value.text)) - _READ | set(_SIGNS.findall(value.text)) for value in (answer, gold)
    )
    return first != second


def _calculation(answer: Value, gold: Value) -> bool:
    return gold.number is not None and answer.number is None


def _unfinished(answer: Value, gold: Value) -> bool:
    if answer.number is None or gold.number is None or answer.percent != gold.percent:
        return False
    return unfinished(answer.number, gold.number)


def _other_number(answer: Value, gold: Value) -> bool:
    return answer.number is not None and gold.number is not None and not _same_number(answer, gold)


def _same_number(answer: Value, gold: Value) -> bool:
    first, second = answer.number, gold.number
    if equal_numbers(first, second):
        return not (answer.percent and not gold.percent and abs(first.value or 1) < 1 and first.value != 0)
    if answer.percent == gold.percent or first.value is None or second.value is None:
        return False
    if answer.percent:
        return first.value / 100 == second.value
    return first.value == second.value / 100


# ------------------------------------------------------------------------- two expressions that math_verify calls equal
def _unequal(answer: Value, gold: Value) -> bool:
    return differ(expression(answer.text), expression(gold.text))


def _other_case(answer: Value, gold: Value) -> bool:
    """The grammar lowers every letter: A and a are one symbol to it. A lone letter is a choice, in any case."""
    first, second = (
        set(re.findall("[A-Za-z]", re.sub(r"\\[a-zA-Z]+", "", TEXT.sub("", value.text)))) for value in (answer, gold)
    )
    if len(second) < 2 and squeeze(gold.text).isalpha():
        return False
    lowered = [{letter.lower() for letter in letters} for letters in (first, second)]
    return first != second and len(lowered[0]) == len(lowered[1]) and lowered[0] == lowered[1]


_TO_EVALUATE = (Integral, Sum, Product, Limit, Derivative)


def _not_evaluated(answer: Value, gold: Value) -> bool:
    return _reducible(expression(answer.text)) and not _reducible(expression(gold.text))


def _reducible(found: Expression) -> bool:
    """Whether arithmetic is left to do in it: 3 + 4, x + x, 2·3·x, √12, 1/√2, log₂ 8, 5!, an integral."""
    if not isinstance(found, Basic):
        return any(_reducible(element) for element in found.flat())
    return any(_reducible_here(node) for node in preorder_traversal(found))


def _reducible_here(node: Basic) -> bool:
    if isinstance(node, _TO_EVALUATE):
        return True
    if isinstance(node, Add):
        return len(Add.make_args(node.func(*node.args))) < len(node.args)
    if isinstance(node, Mul):
        return sum(isinstance(factor, Integer) and abs(factor) != 1 for factor in node.args) > 1
    if isinstance(node, Pow) and node.exp == -1 and isinstance(node.base, Integer):
        return False  # how the grammar holds a quotient
    if isinstance(node, Pow | Function) and not isinstance(node, AppliedUndef | UnevaluatedExpr):
        return not node.free_symbols and node.func(*node.args) != node
    return False


def _other_form(answer: Value, gold: Value) -> bool:
    """A product against its expansion, an unreduced quotient against a polynomial."""
    first, second = expression(answer.text), expression(gold.text)
    if not (isinstance(first, Basic) and isinstance(second, Basic)) or not second.free_symbols:
        return False
    if not isinstance(first, Add | Mul | Pow) or not isinstance(second, Add | Mul | Pow):
        return False
    if not second.is_polynomial():
        return False
    if not first.is_polynomial():
        return True
    return (first.has(Add) or second.has(Add)) and _factors(first) != _factors(second)


def _factors(found: Basic) -> int:
    """Number of factors that are no constants, with multiplicity."""
    if isinstance(found, Mul):
        return sum(_factors(factor) for factor in found.args)
    if isinstance(found, Pow) and isinstance(found.exp, Integer):
        return int(found.exp) * _factors(found.base)
    return 1 if found.free_symbols else 0


# --------------------------------------------------------------------------------------------------------------- rows
WRITTEN = (
    Rule(
        "words",
        "words beside a number that are no unit of the list",
        Case("5", r"5\text{ or more}"),
        Case("5", r"5\text{ cm}"),
        _other_words,
    ),
    Rule(
        "unit",
        "another unit; without one on either side only the numbers count",
        Case(r"5\text{ cm}", "5 m"),
        Case("60", "60 km/h"),
        _other_unit,
    ),
    Rule(
        "base",
        "another number base, or one that the gold answer has not",
        Case("10", "10_2"),
        Case("1001_2", "1001"),
        _other_base,
    ),
    Rule("clock", "another time of day", Case("12:30", "6:15"), Case("12:30", "12:30"), _other_clock),
    Rule("digits apart", "digits that only a space separates", Case("5", "2 3"), Case("1234", "1 234"), _digits_apart),
    Rule(
        "unread",
        "signs that are not known to be read",
        Case("x", r"\approx x"),
        Case("x+1", r"\left(x+1\right)"),
        _unread,
    ),
    Rule("calculation", "a calculation for a written-out number", Case("7", "4+3"), Case("7", "4+3=7"), _calculation),
    Rule("unfinished", "a fraction for a whole number", Case("4", "8/2"), Case(r"\frac{3}{4}", "6/8"), _unfinished),
    Rule(
        "number",
        "another number: written-out numbers are exact, a decimal for a fraction is good to six digits and to 1e-6",
        Case("0.0000011", "0.000001"),
        Case(r"\frac{1}{3}", "0.33333333"),
        _other_number,
    ),
)
EXPRESSIONS = (
    Rule(
        "unequal",
        "another value, however near: both sides are exact",
        Case(r"3-\frac{2027}{2^{2024}}", r"3-\frac{2026}{2^{2024}}"),
        Case(r"2^{-60}", r"4^{-30}"),
        _unequal,
    ),
    Rule("case", "upper and lower case letters are different variables", Case("2a", "2A"), Case("C", "c"), _other_case),
    Rule(
        "arithmetic",
        "arithmetic is left to do that the gold answer has done",
        Case(r"2\sqrt{3}", r"\sqrt{12}"),
        Case(r"2\sqrt{3}", r"\sqrt{3}\cdot 2"),
        _not_evaluated,
    ),
    Rule(
        "form",
        "a polynomial factored, expanded or not divided out, where the gold answer is not",
        Case("x^2-1", "(x-1)(x+1)"),
        Case("2x+2", "2(x+1)"),
        _other_form,
    ),
)
WHOLE = (
    Rule("different", "neither of these, but not equal", Case(r"\sqrt{2}", r"\sqrt{3}"), Case(r"\sqrt{2}", "√2")),
    Rule("word", "another word; words are compared as they are written", Case("no", "on"), Case(r"\text{Yes}", "yes")),
    Rule("name", "the value of another name", Case("x=5", "y=5"), Case("x=5", "5")),
    Rule(
        "equation",
        "an equation that is not solved or is false; only a name may be dropped",
        Case("5", "-x=5"),
        Case("5", "x=5"),
    ),
    Rule(
        "brackets",
        "a set for a pair, a pair for a list, an open end for a closed one",
        Case(r"\{1,2\}", "(1,2)"),
        Case(r"\{1,2\}", "1,2"),
    ),
    Rule("count", "another number of items", Case("1,2,2", "1,2"), Case("10, 100", "100, 10")),
    Rule(
        "order",
        "the items of a pair, tuple, interval or matrix in another order",
        Case("(1,2)", "(2,1)"),
        Case("(1,2)", "x=1,y=2"),
    ),
)
RULES = WRITTEN + EXPRESSIONS + WHOLE
