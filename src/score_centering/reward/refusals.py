"""Where math_verify says yes and training must not: each refusal is one function with one reason.

An answer that only restates the problem (4 + 3 for 7, √12 for 2√3, a product for its expansion), that hides a wrong
part behind an equals sign, or that differs in what the grammar throws away (units, number bases, upper case) is equal
as math_verify sees it; rewarded, it is the cheapest thing that a policy can learn.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from sympy import (
    Add,
    Basic,
    Derivative,
    Eq,
    Function,
    Integer,
    Integral,
    Interval,
    Limit,
    MatrixBase,
    Mul,
    Number,
    Pow,
    Product,
    Sum,
    Tuple,
    UnevaluatedExpr,
    preorder_traversal,
)
from sympy import FiniteSet as SympyFiniteSet
from sympy.core.function import AppliedUndef

RELATIVE_TOLERANCE = 1e-6  # of a decimal answer, where the gold answer is no integer
MAX_UNIT_WORDS = 3


class Parsed(NamedTuple):
    """An answer three times: as written, as math_verify normalises its LaTeX, and as SymPy holds it."""

    written: str
    latex: str
    expression: Basic | MatrixBase


def refusal(answer: Parsed, gold: Parsed) -> str | None:
    """Why an answer that math_verify calls equivalent is not accepted, or None."""
    if answer.written == gold.written:
        return None
    return next((reason for reason, applies in _REFUSALS.items() if applies(answer, gold)), None)


# ---------------------------------------------------------------------------------------------------- LaTeX as written
_SPACING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|q?quad)(?![a-zA-Z])|\\[,;:! ()]|[~$]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_NUMBER = re.compile(
    r"""[+-]?(?:
        (?P<decimal>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
      | (?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:\\times|\\cdot|\*))?10\^(?:\{[+-]?[0-9]+\}|[0-9])
      | (?P<fraction>(?:[0-9]+)?\\frac\{[+-]?[0-9]+\}\{[+-]?[0-9]+\}|[0-9]+/[0-9]+|[0-9]+:[0-9]+)
    )(?:\\?%|\^\{?\\circ\}?)?(?:_\{?[0-9]+\}?)?""",
    re.VERBOSE,
)
_GROUPED = re.compile(r"^(?:\\?[(\[{])+([^()\[\]{}]*?|[+-]?[0-9]*\\frac\{[^{}]*\}\{[^{}]*\})(?:\\?[)\]}])+$")


def _squeeze(latex: str) -> str:
    """LaTeX without spacing and sizing; digits that nothing but a space separates are kept apart by `~`."""
    return re.sub(r"(?<![_^][0-9])(?<=[0-9]) +(?=[0-9])", "~", _SPACING.sub(" ", latex)).replace(" ", "")


def _last_side(latex: str) -> str:
    """What stands after the last equals sign, out of its parentheses."""
    return _sides(latex)[-1]


def _sides(latex: str) -> list[str]:
    return [_GROUPED.sub(r"\1", side) for side in _EQUALS.split(_squeeze(_TEXT.sub(r"\1", latex)))]


def _is_written_number(side: Parsed) -> bool:
    """Whether it is a number as one writes a result, alone or as the value of a name."""
    if isinstance(side.expression, Eq) and not _names_or_equals(side.expression):
        return False
    return _NUMBER.fullmatch(_last_side(side.latex)) is not None


def _is_integer_text(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9,]+", text) is not None


# ------------------------------------------------------------------------------------------------------------ refusals
def _no_written_number(answer: Parsed, gold: Parsed) -> bool:
    if not _is_written_number(gold):
        return False
    sides = _sides(answer.latex)
    return not any(_NUMBER.fullmatch(side) for side in (sides if isinstance(gold.expression, Eq) else sides[-1:]))


def _no_written_integer(answer: Parsed, gold: Parsed) -> bool:
    target, side = _last_side(gold.latex), _last_side(answer.latex)
    number = _NUMBER.fullmatch(side)
    if not _is_integer_text(target) or number is None:
        return False
    if number["decimal"] and "%" not in side:
        return Fraction(number["decimal"].replace(",", "")).denominator != 1
    return number["fraction"] is not None


def _outside_tolerance(answer: Parsed, gold: Parsed) -> bool:
    first, second = answer.expression, gold.expression
    if not (isinstance(first, Number) and isinstance(second, Number)) or first == second:
        return False
    return bool(abs(first - second) > RELATIVE_TOLERANCE * abs(second))


_MISREAD = re.compile(r"~|[0-9]\\frac\{[^{}]*\}\{[^{}]*\}\\?%|\\[lcd]?dots|\.\.\.")


def _misread(answer: Parsed, gold: Parsed) -> bool:
    """Digits that only a space separates are added, a mixed number in percent is multiplied, dots are left out."""
    return _MISREAD.search(_squeeze(answer.written)) is not None


def _false_equation(answer: Parsed, gold: Parsed) -> bool:
    if gold.expression.has(Eq):
        return False
    return any(not _names_or_equals(equation) for equation in answer.expression.atoms(Eq))


def _names_or_equals(equation: Eq) -> bool:
    """Whether the left side is a name without numbers (x, f(x), a + b) or a constant equal to the right side."""
    if equation.lhs.free_symbols or equation.lhs.atoms(AppliedUndef):
        return not equation.lhs.atoms(Number) - {Integer(-1)} or isinstance(equation.lhs, AppliedUndef)
    return bool((equation.lhs - equation.rhs).doit().evalf(15, chop=True) == 0)


def _other_word(answer: Parsed, gold: Parsed) -> bool:
    word = _TEXT.sub(r"\1", gold.written).strip()
    return (
        re.fullmatch(r"[A-Za-z]{3,}", word) is not None
        and _TEXT.sub(r"\1", answer.written).strip(" .").casefold() != word.casefold()
    )


def _other_brackets(answer: Parsed, gold: Parsed) -> bool:
    first, second = _squeeze(answer.latex), _squeeze(gold.latex)
    braces = [text.startswith(r"\{") for text in (first, second)]
    parentheses = [text.startswith(("(", "[")) for text in (first, second)]
    return "," in first and "," in second and any(braces) and any(parentheses)


def _other_count(answer: Parsed, gold: Parsed) -> bool:
    texts = [_squeeze(side.latex) for side in (answer, gold)]
    if not all(isinstance(side.expression, SympyFiniteSet) for side in (answer, gold)):
        return False
    if any(re.search(r"[()\[\]]|\\\{|\\pm", text) for text in texts):
        return False
    counts = [len(re.split("[,;]", text)) for text in texts]
    return counts[0] != counts[1]


def _other_order(answer: Parsed, gold: Parsed) -> bool:
    """Assignments (y = 1, x = 2) against an ordered tuple: they are matched in the order in which they are written."""
    if not isinstance(gold.expression, Tuple | Interval) or not isinstance(answer.expression, SympyFiniteSet):
        return False
    names = re.findall(r"([A-Za-z_0-9]+)=", _squeeze(answer.latex))
    return names != sorted(names)


def _other_base(answer: Parsed, gold: Parsed) -> bool:
    bases = [re.findall(r"[0-9A-Fa-f]_\{?([0-9]+)\}?$", _squeeze(side.latex)) for side in (answer, gold)]
    return all(bases) and bases[0] != bases[1]


def _other_unit(answer: Parsed, gold: Parsed) -> bool:
    found, expected = _unit(answer.written), _unit(gold.written)
    if len(found) > MAX_UNIT_WORDS or _HEDGES.intersection(found):
        return found != expected
    return bool(found and expected) and _unit_name(found) != _unit_name(expected)


_HEDGES = {
    *("not", "no", "isn", "is", "wrong", "incorrect", "false", "maybe", "never", "except", "about", "than"),
    *("dozen", "hundred", "thousand", "million", "billion", "trillion"),
}


def _unit(written: str) -> list[str]:
    """The words and exponents after the last number: 5\\text{ cm}^2 → [cm, 2]."""
    tail = re.search(
        r"[0-9)}%]\s*((?:\\[,;:! ]|\s)*(?:\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|[A-Za-z]{2,}).*)$", written
    )
    if tail is None:
        return []
    return re.findall(r"[A-Za-z]+|[0-9]", _TEXT.sub(r" \1 ", tail[1]).casefold())


def _unit_name(words: list[str]) -> str:
    return "".join(word.removesuffix("s") if len(word) > 2 else word for word in words)


def _other_clock(answer: Parsed, gold: Parsed) -> bool:
    clock = re.match(r"[0-9]{1,2}:[0-9]{2}(?![0-9])", gold.written)
    return clock is not None and not answer.written.lstrip(" $").startswith(clock[0])


def _other_case(answer: Parsed, gold: Parsed) -> bool:
    """The grammar lowers every letter: A and a are one symbol to it. A lone letter is a choice, in any case."""
    first, second = (
        set(re.findall("[A-Za-z]", _COMMAND.sub("", _TEXT.sub("", side.latex)))) for side in (answer, gold)
    )
    if len(second) < 2 and _squeeze(gold.latex).strip("()").isalpha():
        return False
    lowered = [{letter.lower() for letter in letters} for letters in (first, second)]
    return first != second and len(lowered[0]) == len(lowered[1]) and lowered[0] == lowered[1]


_TO_EVALUATE = (Integral, Sum, Product, Limit, Derivative)


def _not_evaluated(answer: Parsed, gold: Parsed) -> bool:
    if _is_written_number(gold):
        return False
    return _reducible(answer.expression) and not _reducible(gold.expression)


def _reducible(expression: Basic | MatrixBase) -> bool:
    """Whether arithmetic is left to do in it: 3 + 4, x + x, 2·3·x, √12, 1/√2, log₂ 8, 5!, an integral."""
    if not isinstance(expression, Basic):
        return any(_reducible(element) for element in expression.flat())
    return any(_reducible_here(node) for node in preorder_traversal(expression))


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


def _other_form(answer: Parsed, gold: Parsed) -> bool:
    """A product against its expansion, an unreduced quotient against a polynomial."""
    first, second = answer.expression, gold.expression
    if not (isinstance(first, Basic) and isinstance(second, Basic)) or not second.free_symbols:
        return False
    if not isinstance(first, Add | Mul | Pow) or not isinstance(second, Add | Mul | Pow):
        return False
    if not second.is_polynomial():
        return False
    if not first.is_polynomial():
        return True
    return (first.has(Add) or second.has(Add)) and _factors(first) != _factors(second)


def _factors(expression: Basic) -> int:
    """Number of factors that are no constants, with multiplicity."""
    if isinstance(expression, Mul):
        return sum(_factors(factor) for factor in expression.args)
    if isinstance(expression, Pow) and isinstance(expression.exp, Integer):
        return int(expression.exp) * _factors(expression.base)
    return 1 if expression.free_symbols else 0


_REFUSALS = {
    "math_verify misreads digits apart, mixed numbers in percent, and dots": _misread,
    "the gold answer is a written-out number, the answer is a calculation": _no_written_number,
    "the gold answer is an integer, the answer is a fraction or a near miss": _no_written_integer,
    "the numbers differ by more than a relative 1e-6": _outside_tolerance,
    "one side of an equation is false, or is an unsolved expression": _false_equation,
    "another word of the same letters": _other_word,
    "a set against an ordered tuple or an interval": _other_brackets,
    "the lists have different lengths": _other_count,
    "the assignments are in another order than the tuple": _other_order,
    "another number base": _other_base,
    "another unit, or words that are none": _other_unit,
    "another time of day": _other_clock,
    "upper and lower case letters are different variables": _other_case,
    "arithmetic is left to do that the gold answer has done": _not_evaluated,
    "another form of the polynomial: factored, expanded or not divided out": _other_form,
}
