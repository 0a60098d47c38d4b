"""Exact rationals, rounded once and to the safe side."""

import math
from fractions import Fraction


def quotient_up(numerator: int, denominator: float) -> float:
    """The least float at or above numerator/denominator.

    Example:
        >>> quotient_up(1, 4.0), quotient_up(1, 10.0) >= 0.1
        (0.25, True)
    """
    return fraction_up(Fraction(numerator) / Fraction(denominator))


def fraction_up(exact: Fraction) -> float:
    """The least float at or above an exact rational; inf where it overflows."""
    try:
        number = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(number, math.inf) if Fraction(number) < exact else number


def fraction_down(exact: Fraction) -> float:
    """The greatest float at or below an exact rational ≥ 0."""
    try:
        number = float(exact)
    except OverflowError:
        return math.nextafter(math.inf, 0.0)
    return math.nextafter(number, 0.0) if Fraction(number) > exact else number


def sqrt_bounds(square: Fraction) -> tuple[float, float]:
    """Floats at or below, and at or above, the square root of an exact rational > 0.

    Example:
        >>> sqrt_bounds(Fraction(9)), sqrt_bounds(Fraction(2))[0] < sqrt_bounds(Fraction(2))[1]
        ((3.0, 3.0), True)
    """
    shift = max(0, 64 + (square.denominator.bit_length() - square.numerator.bit_length()) // 2)
    scaled = (square.numerator << (2 * shift)) // square.denominator
    root = math.isqrt(scaled)
    exact = Fraction(root, 1 << shift) ** 2 == square
    return fraction_down(Fraction(root, 1 << shift)), fraction_up(Fraction(root + (not exact), 1 << shift))
