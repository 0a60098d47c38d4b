"""Numbers as text: bounds are rounded up, everything else to nearest."""

import math
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from typing import Final

BLANK: Final = "—"
_DIGITS: Final = 4
_FORGIVEN: Final = Decimal("1e-9")  # relative; keeps an ε of 1 + 1e-12 from being shown as 1.001


def bound(value: float | None) -> str:
    """An upper bound (ε, δ, sensitivity) with 4 significant digits, rounded up.

    Args:
        value: At least 0, infinite, or None for blank.

    Raises:
        ValueError: NaN or a negative value.

    Guarantee:
        The number shown is at least (1 - 1e-9) times the value.

    Edge cases:
        None gives a dash, infinity gives ∞, 0 gives 0.

    Example:
        >>> bound(4.37701), bound(1.0000000000003), bound(1e-5), bound(None)
        ('4.378', '1', '1e-5', '—')
    """
    return _significant(value, rounding=ROUND_CEILING, forgiven=_FORGIVEN)


def nearest(value: float | None) -> str:
    """A measured number with 4 significant digits, rounded to nearest.

    Example:
        >>> nearest(3.73062), nearest(0.05), nearest(12_345_678.0)
        ('3.731', '0.05', '1.235e7')
    """
    return _significant(value, rounding=ROUND_HALF_EVEN, forgiven=Decimal(0))


def exact(value: float | int | str | None) -> str:
    """A setting as it was given: 15 significant digits, no trailing zeros; text stays as it is.

    Example:
        >>> exact(1.0), exact(0.00001), exact("any"), exact(math.inf), exact(None)
        ('1', '1e-5', 'any', '∞', '—')
    """
    if value is None:
        return BLANK
    if isinstance(value, str):
        return value
    return "∞" if math.isinf(value) else _plain_digits(Decimal(f"{value:.15g}"))


def spread(mean: float | None, stddev: float | None) -> str:
    """Mean and standard deviation with one decimal; the mean alone where there is no deviation.

    Args:
        mean: In the unit of the column (per cent or points), or None.
        stddev: In the same unit, or None for a single run.

    Example:
        >>> spread(91.26, 0.4), spread(-2.0, None), spread(None, None)
        ('91.3 ± 0.4', '−2.0', '—')
    """
    if mean is None:
        return BLANK
    text = f"{mean:.1f}".replace("-", "−")
    text = "0.0" if text == "−0.0" else text
    return text if stddev is None else f"{text} ± {stddev:.1f}"


def _significant(value: float | None, *, rounding: str, forgiven: Decimal) -> str:
    if value is None:
        return BLANK
    if math.isnan(value) or value < 0:
        raise ValueError(f"value is {value!r}: figures shown are at least 0; leave it blank if it is unknown")
    if math.isinf(value):
        return "∞"
    number = Decimal(value) * (1 - forgiven)
    return _plain_digits(Context(prec=_DIGITS, rounding=rounding).plus(number))


def _plain_digits(number: Decimal) -> str:
    if number.is_zero():
        return "0"
    exponent = number.adjusted()
    is_power_of_ten = number.normalize().as_tuple().digits == (1,)
    if -1 <= exponent < 6 or (exponent == -2 and not is_power_of_ten):
        text = f"{number:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    digits = f"{number.scaleb(-exponent):f}"
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + f"e{exponent}"
