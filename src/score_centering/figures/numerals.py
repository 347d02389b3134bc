"""Numbers as people read them."""

import numpy as np


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def power_of_ten(value: float) -> str:
    """One significant digit, as on an axis: 0.002 is "2×10⁻³", 0.01 is "10⁻²"."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digit = round(value / 10.0**exponent)
    power = f"10{superscript(exponent)}"
    return power if digit == 1 else f"{digit}×{power}"


def scientific(value: float) -> str:
    """Two significant digits: 0.0023 is "2.3×10⁻³"."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}×10{superscript(int(exponent))}"


def percent(share: float, decimals: int = 0) -> str:
    """0.1 is "10 %", with a space that does not break."""
    return f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"
