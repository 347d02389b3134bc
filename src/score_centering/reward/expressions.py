"""Values as SymPy expressions: read by math_verify's grammar, compared by math_verify, told apart exactly.

Runs in worker processes only: nothing here has a deadline.
"""

import functools
import logging
from fractions import Fraction

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    Eq,
    Expr,
    Float,
    I,
    Integer,
    MatrixBase,
    PrecisionExhausted,
    Product,
    Rational,
    Sum,
    Symbol,
    UnevaluatedExpr,
    fraction,
    nan,
    solve,
    together,
    zoo,
)
from sympy.core.relational import Relational

from score_centering.reward import grammar
from score_centering.reward.literals import Number, close

DIGITS = 2500  # to which a difference is calculated before it is taken for zero

# Arbitrary values, one a symbol by rank; negative ones too, so that |x| and x differ.
_POINTS = (
    tuple(Rational(n, 100) for n in (73, -131, 217, -59, 183, 341)),
    tuple(Rational(n, 100) for n in (-47, 119, 83, 271, -151, -29)),
)
_CLEAR = 1e-5  # relative; far above every rounding
# Units are ours: math_verify would cut `ab` off 2ab for one.
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_CONFIG = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALIZATION)]

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
grammar.install()

Expression = Basic | MatrixBase


@functools.lru_cache(maxsize=2048)
def expression(text: str) -> Expression | None:
    """What math_verify reads in `text`, decimals as the fractions that they are; None where it reads no math."""
    read = parse(rf"\boxed{{{text}}}", _CONFIG, parsing_timeout=None)
    if not read or isinstance(read[0], str) or read[0] in (nan, zoo):
        return None
    found = read[0]
    exact = {number: Rational(str(number)) for number in found.atoms(Float)}
    # The grammar takes a text with an i for complex in all its letters, and its i for a letter.
    names = {symbol: Symbol(symbol.name, real=True) for symbol in found.atoms(Symbol) if symbol.is_real is not True}
    if not found.has(Sum, Product, Relational):
        names |= {symbol: I for symbol in found.atoms(Symbol) if symbol.name == "i"}
    return found.xreplace(exact | names) if exact or names else found


def equivalent(answer: Expression, gold: Expression) -> bool:
    """Whether math_verify calls them equivalent; a difference that shows at one point spares asking it."""
    return not clearly_different(answer, gold) and verify([gold], [answer], timeout_seconds=None)


def clearly_different(first: Expression, second: Expression) -> bool:
    """Whether two scalar expressions have finite values that differ by more than rounding at a fixed point.

    False where it cannot tell. Spares SymPy's `simplify` of the difference, which takes a hundred times longer.
    """
    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    if first.is_Symbol or second.is_Symbol or first.has(UnevaluatedExpr) or second.has(UnevaluatedExpr):
        return False
    point = _point((first, second), 0)
    if point is None:
        return False
    values = [expression.evalf(15, subs=point) for expression in (first, second)]
    if not all(value.is_number and value.is_finite and not value.free_symbols for value in values):
        return False
    difference, *sizes = (abs(value).evalf(15) for value in (values[0] - values[1], *values))
    return bool(difference > _CLEAR * max(sizes))


def _point(expressions: tuple[Expression, ...], which: int) -> dict[Symbol, Rational] | None:
    symbols = set().union(*(expression.free_symbols for expression in expressions))
    names = sorted({str(symbol) for symbol in symbols})
    if len(names) > len(_POINTS[which]):
        return None
    return {symbol: _POINTS[which][names.index(str(symbol))] for symbol in symbols}


def differ(first: Expression, second: Expression) -> bool:
    """Whether two expressions that math_verify calls equivalent are not equal, exactly.

    Numbers by their difference, calculated to `DIGITS` digits where it is no fraction; expressions by numbers at two
    points. False where it cannot tell.
    """
    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        return any(differ(one, other) for one, other in zip(first.flat(), second.flat(), strict=True))
    if first == second or not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    return any(_is_not_zero(first - second, _point((first, second), which)) for which in (0, 1))


def _is_not_zero(difference: Expr, point: dict[Symbol, Rational] | None) -> bool:
    value = None if point is None else difference.subs(point).doit()
    if value is None or value.free_symbols or value.is_finite is False:
        return False
    if value.is_Rational:
        return value != 0
    try:
        return bool(value.evalf(2, maxn=DIGITS, strict=True) != 0)
    except (PrecisionExhausted, NotImplementedError, ValueError):
        return False


def same_relation(answer: Expression, gold: Expression) -> bool:
    """Whether two equations or inequalities have the same solutions.

    Equations of polynomials by their differences without denominators, which must be proportional; others where
    math_verify says so and nothing contradicts it.
    """
    if not (isinstance(answer, Relational) and isinstance(gold, Relational)):
        return False
    if not all(isinstance(side, Expr) for relation in (answer, gold) for side in relation.args):
        return verify([gold], [answer], timeout_seconds=None)
    residuals = [relation.lhs - relation.rhs for relation in (answer, gold)]
    if not (isinstance(answer, Eq) and isinstance(gold, Eq)):
        return _proportional(*residuals) and verify([gold], [answer], timeout_seconds=None)
    numerators = [fraction(together(residual))[0] for residual in residuals]
    if _proportional(*numerators):
        return True
    if all(numerator.is_polynomial() for numerator in numerators):
        return False
    return verify([gold], [answer], timeout_seconds=None) and _same_solutions(*residuals)


def _proportional(first: Expr, second: Expr) -> bool:
    """Whether their quotient is the same at both points."""
    points = [_point((first, second), which) for which in (0, 1)]
    if None in points:
        return False
    (a, b), (c, d) = ([residual.subs(point) for residual in (first, second)] for point in points)
    return first.free_symbols == second.free_symbols and not _is_not_zero(a * d - b * c, {})


def _same_solutions(first: Expr, second: Expr) -> bool:
    """Whether each vanishes where the other does, solved for one symbol of both."""
    for symbol in sorted(first.free_symbols & second.free_symbols, key=str):
        solutions = [solve(residual, symbol) for residual in (first, second)]
        if all(solutions) and len(solutions[0]) == len(solutions[1]):
            return not any(
                differ(other.subs(symbol, root), Integer(0))
                for other, roots in zip((second, first), solutions, strict=True)
                for root in roots
            )
    return False


def rounds_to(answer: Number, gold: Expression) -> bool:
    """Whether a written-out number is the value of a gold expression: exactly, or rounded where it is a decimal."""
    if answer.value is None or not isinstance(gold, Expr) or gold.free_symbols:
        return False
    difference = gold - Rational(answer.value.numerator, answer.value.denominator)
    if not _is_not_zero(difference, {}):
        return bool(difference.evalf(15, chop=True) == 0)
    if answer.form not in ("decimal", "power"):
        return False
    target, off = gold.evalf(30), difference.evalf(10)
    if not (target.is_Float and off.is_Float):
        return False
    return close(Fraction(str(off)), abs(Fraction(str(target))), answer.step)


def is_about(rounded: Number, found: Expression) -> bool:
    """Whether `rounded` is a number's value to its own last digit: 3.46 for 2√3, but for nothing farther off."""
    if rounded.value is None or not isinstance(found, Expr) or found.free_symbols:
        return False
    off = (found - Rational(rounded.value.numerator, rounded.value.denominator)).evalf(10)
    return bool(off.is_comparable and abs(off) <= Rational(str(rounded.step or Fraction(1, 2))))
