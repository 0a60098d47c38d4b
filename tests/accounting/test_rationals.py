"""Rounding of exact rationals."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from asfl_privacy.accounting.rationals import fraction_down, fraction_up, quotient_up, sqrt_bounds

RATIONALS = st.fractions(min_value=Fraction(1, 10**40), max_value=10**40)


@given(RATIONALS)
def test_neighbouring_floats_enclose_the_rational(exact):
    """Catches: round-to-nearest in place of outward rounding."""
    low, high = fraction_down(exact), fraction_up(exact)
    assert Fraction(low) <= exact <= Fraction(high)
    assert high in (low, math.nextafter(low, math.inf))


@given(RATIONALS)
def test_square_roots_are_enclosed(exact):
    low, high = sqrt_bounds(exact)
    assert Fraction(low) ** 2 <= exact <= Fraction(high) ** 2
    assert high <= math.nextafter(math.nextafter(low, math.inf), math.inf)


def test_the_ends_of_the_float_range():
    assert fraction_up(Fraction(10) ** 400) == math.inf
    assert fraction_up(Fraction(1, 10**400)) == 5e-324
    assert fraction_down(Fraction(1, 10**400)) == 0.0
    assert math.isfinite(fraction_down(Fraction(10) ** 400))
    assert sqrt_bounds(Fraction(9, 4)) == (1.5, 1.5)
    assert Fraction(quotient_up(1, 3.0)) >= Fraction(1, 3)
