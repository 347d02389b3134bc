"""A cheap no before an expensive one: two expressions that differ at one point are not equal."""

from sympy import Basic, Expr, Float, UnevaluatedExpr

# Arbitrary values, one a symbol by rank; negative ones too, so that |x| and x differ.
_POINTS = (Float("0.73"), Float("-1.31"), Float("2.17"), Float("-0.59"), Float("1.83"), Float("3.41"))
_CLEAR = 1e-5  # relative; far above every rounding that math_verify allows


def clearly_different(first: Basic, second: Basic) -> bool:
    """Whether two scalar expressions have finite values that differ by more than rounding at a fixed point.

    False where it cannot tell. Spares SymPy's `simplify` of the difference, which takes a hundred times longer.
    """
    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    if first.is_Symbol or second.is_Symbol or first.has(UnevaluatedExpr) or second.has(UnevaluatedExpr):
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if len(symbols) > len(_POINTS):
        return False
    point = dict(zip(symbols, _POINTS, strict=False))
    values = [expression.evalf(15, subs=point) for expression in (first, second)]
    if not all(value.is_number and value.is_finite and not value.free_symbols for value in values):
        return False
    difference, *sizes = (abs(value).evalf(15) for value in (values[0] - values[1], *values))
    return bool(difference > _CLEAR * max(1, *sizes))
