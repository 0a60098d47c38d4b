import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensitivity.rounding import (
    add_up,
    div_up,
    gamma,
    inflate,
    mul_up,
    norm2_up,
    require_bound,
    scale_to_unit,
    sqrt_up,
)

sizes = st.floats(min_value=0.0, max_value=1e150, allow_nan=False)
positive = st.floats(min_value=1e-150, max_value=1e150, allow_nan=False)


@given(st.lists(sizes, min_size=1, max_size=8))
def test_no_sum_is_below_the_rational_sum(terms):
    exact = sum(map(Fraction, terms), Fraction(0))
    assert Fraction(add_up(*terms)) >= exact
    assert Fraction(math.nextafter(add_up(*terms), -math.inf)) < exact or add_up(*terms) == 0.0


@given(sizes, sizes)
def test_no_product_is_below_the_rational_product(a, b):
    exact = Fraction(a) * Fraction(b)
    assert Fraction(mul_up(a, b)) >= exact
    assert mul_up(a, b) == 0.0 or Fraction(math.nextafter(mul_up(a, b), 0.0)) < exact


@given(sizes, positive)
def test_no_quotient_is_below_the_rational_quotient(a, b):
    assert Fraction(div_up(a, b)) >= Fraction(a) / Fraction(b)


@given(sizes)
def test_no_root_is_below_the_real_root(a):
    assert Fraction(sqrt_up(a)) ** 2 >= Fraction(a)
    assert sqrt_up(a) == 0.0 or Fraction(math.nextafter(sqrt_up(a), 0.0)) ** 2 < Fraction(a)


@pytest.mark.parametrize(("a", "b"), [(1e-200, 1e-200), (5e-324, 0.5)])
def test_products_that_underflow_stay_positive(a, b):
    assert mul_up(a, b) > 0.0


def test_exact_results_are_left_alone():
    assert (add_up(0.5, 0.25), mul_up(3.0, 0.5), sqrt_up(9.0), norm2_up([3.0, 4.0])) == (0.75, 1.5, 3.0, 5.0)


@given(st.lists(st.floats(min_value=0.0, max_value=1.0), min_size=1, max_size=400), st.integers(0, 10))
def test_an_inflated_numpy_sum_is_never_below_the_exact_sum(terms, seed):
    """Mutation caught: returning the float sum as it is (the adversarial case below shows that one is too small)."""
    array = np.random.default_rng(seed).permutation(terms)
    assert Fraction(inflate(float(array.sum()), num_operations=array.size)) >= sum(map(Fraction, terms), Fraction(0))


def test_the_plain_sum_of_an_adversarial_vector_is_too_small_and_the_inflated_one_is_not():
    terms = np.array([1.0] + [2.0**-54] * 200)
    plain = 0.0
    for term in terms:
        plain += float(term)
    exact = sum(map(Fraction, terms.tolist()), Fraction(0))
    assert Fraction(plain) < exact
    assert Fraction(inflate(plain, num_operations=len(terms))) >= exact


@pytest.mark.parametrize("num_operations", [1, 10, 10**6])
def test_gamma_is_at_or_above_its_definition(num_operations):
    n = Fraction(num_operations) / 2**53
    assert Fraction(gamma(num_operations)) >= n / (1 - n)


def test_gamma_refuses_sums_too_long_for_its_theorem():
    with pytest.raises(ValueError, match="too many"):
        gamma(2**52)


@given(st.lists(st.floats(min_value=-1e300, max_value=1e300), min_size=1, max_size=6))
def test_scaling_to_unit_is_exact(values):
    array = np.array(values)
    scaled, scale = scale_to_unit(array)
    assert not array.any() or 0.5 <= np.abs(scaled).max() < 1.0 or np.abs(array).max() < 1e-300
    for value, small in zip(values, scaled.tolist(), strict=True):
        assert abs(Fraction(small) * Fraction(scale) - Fraction(value)) <= Fraction(scale) * Fraction(2) ** -1074


@pytest.mark.parametrize("operation", [add_up, mul_up, div_up])
def test_nan_never_slips_through(operation):
    """Mutation caught: comparing with max(), which drops NaN."""
    with pytest.raises(ValueError, match="NaN"):
        operation(math.nan, 1.0)
    with pytest.raises(ValueError, match="NaN"):
        operation(1.0, math.nan)
    with pytest.raises(ValueError, match="NaN"):
        sqrt_up(math.nan)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_bound_is_refused(value):
    with pytest.raises(ValueError, match="a bound is a finite number"):
        require_bound(value, what="norm")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scaling_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        scale_to_unit(np.array([1.0, bad]))


def test_no_bound_absorbs_and_a_zero_difference_stays_zero():
    assert add_up(1.0, math.inf) == math.inf
    assert mul_up(2.0, math.inf) == math.inf
    assert mul_up(0.0, math.inf) == 0.0


def test_division_by_nothing_is_refused():
    with pytest.raises(ValueError, match="not positive"):
        div_up(1.0, 0.0)
