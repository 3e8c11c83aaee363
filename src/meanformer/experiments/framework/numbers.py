"""Numbers as people write them: few digits, powers of ten as powers of ten."""

import math
from typing import Any

from meanformer.experiments.framework.claims import Finding

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SYMBOLS = {"close to": "≈", "at most": "≤", "at least": "≥", "inside": "∈"}
SYMBOLS |= {"above": ">", "below": "<"}
SLACK_SIGNS = {"close to": "±", "at most": "+", "at least": "−"}


def digits_and_power(value: float, digits: int = 5) -> tuple[str, int | None]:
    """Digits of a number, and its power of ten if that is written apart."""
    if not math.isfinite(value):
        return ("not a number" if math.isnan(value) else f"{value:+}"[0] + "∞"), None
    if value == 0:
        return "0", None
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if -4 <= power < 6 or (value == int(value) and power < 9):
        decimals = max(0, digits - 1 - power)
        return _trimmed(f"{value:.{decimals}f}"), None
    return _trimmed(mantissa), power


def plain(value: Any, digits: int = 5) -> str:
    """A number for the terminal, like `1.2×10⁻⁵`; other things as they are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    mantissa, power = digits_and_power(float(value), digits)
    if power is None:
        return mantissa
    factor = "" if mantissa == "1" else f"{mantissa}×"
    return f"{factor}10{str(power).translate(SUPERSCRIPTS)}"


def symbol(finding: Finding) -> str:
    """The sign of a relation; closeness without tolerance is equality."""
    is_exact = finding.relation == "close to" and finding.tolerance == 0
    return "=" if is_exact else SYMBOLS[finding.relation]


def digits_to_tell_apart(first: float, second: float, least: int = 5) -> int:
    """How many digits show that two different numbers differ."""
    for digits in range(least, 16):
        written = {digits_and_power(value, digits) for value in (first, second)}
        if first == second or len(written) == 2:
            return digits
    return least


def finding_digits(finding: Finding) -> int:
    """Digits for a finding: enough to see on which side of a bound the value is."""
    if isinstance(finding.expected, tuple) or finding.relation == "close to":
        return 5
    return digits_to_tell_apart(finding.measured, finding.expected)


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
