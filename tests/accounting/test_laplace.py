"""Laplace closed forms against hand values and the hockey-stick integral."""

import math
from fractions import Fraction

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.laplace import (
    laplace_delta,
    laplace_epsilon,
    laplace_noise_multiplier,
    laplace_total_epsilon,
)


def hockey_stick(epsilon, shift):
    """∫ (p − e^ε q)₊ for unit-scale Laplace densities centred at 0 (p) and at ``shift`` (q), integrated piecewise."""
    with mp.workdps(30):

        def excess(x):
            return max(mp.mpf(0), mp.exp(-abs(x)) / 2 - mp.exp(epsilon - abs(x - shift)) / 2)

        cut = (mp.mpf(shift) - mp.mpf(epsilon)) / 2  # left of it the excess is positive
        return mp.quad(excess, [-60, -20, -5, 0, cut]) if cut > 0 else mp.mpf(0)


@pytest.mark.parametrize(("epsilon", "z"), [(0.0, 1.0), (0.5, 1.0), (0.99, 1.0), (1.0, 0.25), (3.9, 0.25), (0.1, 2.0)])
def test_delta_equals_the_hockey_stick_integral(epsilon, z):
    expected = float(hockey_stick(epsilon, 1 / mp.mpf(z)))
    assert laplace_delta(epsilon, noise_multiplier=z) == pytest.approx(expected, rel=1e-9)
    assert laplace_delta(epsilon, noise_multiplier=z) >= expected * (1 - 1e-15)


def test_delta_is_zero_from_the_pure_epsilon_on():
    assert laplace_delta(0.5, noise_multiplier=2.0) == 0.0
    assert laplace_delta(math.nextafter(0.5, 0.0), noise_multiplier=2.0) > 0.0


@settings(max_examples=80, deadline=None)
@given(z=st.floats(0.05, 1e3), log_delta=st.floats(-12.0, -0.01))
def test_epsilon_and_delta_are_inverse_and_safe(z, log_delta):
    """Catches: the wrong sign of 2 ln(1 − δ), or rounding ε down."""
    delta = 10.0**log_delta
    epsilon = laplace_epsilon(delta, noise_multiplier=z)
    with mp.workdps(40):
        exact = max(mp.mpf(0), 1 / mp.mpf(z) + 2 * mp.log1p(-mp.mpf(delta)))
        assert exact <= epsilon <= exact + mp.mpf("1e-13") * (1 / mp.mpf(z) + 1)


def test_pure_calibration_is_one_over_epsilon():
    assert laplace_noise_multiplier(0.5) == 2.0
    assert laplace_noise_multiplier(8.0, num_releases=10) == 1.25
    assert laplace_noise_multiplier(1.0, num_releases=2.5) == 3.0


def test_calibration_with_delta_follows_the_formula():
    """b = Δ/(ε − 2 ln(1 − δ)); at ε=1, δ=.05 by hand: 1/(1 + .102586588775) = .906957…"""
    assert laplace_noise_multiplier(1.0, delta=0.05) == pytest.approx(0.9069578, abs=5e-7)
    assert laplace_noise_multiplier(1.0, delta=0.05) < laplace_noise_multiplier(1.0)


def test_totals_agree_with_the_written_values(golden, agrees):
    row = golden["total_of_eight"][0]
    z = laplace_noise_multiplier(8.0, num_releases=row["num_releases"])
    assert agrees(math.sqrt(2.0) * z, row["laplace"])


@settings(max_examples=80, deadline=None)
@given(
    epsilon=st.floats(1e-3, 100.0),
    delta=st.one_of(st.just(0.0), st.floats(1e-12, 0.5)),
    num_releases=st.integers(1, 5000),
)
def test_calibration_never_overspends(epsilon, delta, num_releases):
    """Catches: rounding z down, or giving every release the whole δ."""
    z = laplace_noise_multiplier(epsilon, delta=delta, num_releases=num_releases)
    assert laplace_total_epsilon(z, delta=delta, num_releases=num_releases) <= epsilon
    if delta == 0.0:
        assert num_releases / Fraction(z) <= Fraction(epsilon)
    with mp.workdps(40):
        each = max(mp.mpf(0), 1 / mp.mpf(z) + 2 * mp.log1p(-mp.mpf(delta) / num_releases))
        assert num_releases * each <= mp.mpf(epsilon)


def test_zero_epsilon_and_zero_delta_are_refused():
    with pytest.raises(ValueError, match="infinite noise"):
        laplace_noise_multiplier(0.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_multipliers_are_refused(bad):
    with pytest.raises(ValueError, match="noise_multiplier is"):
        laplace_total_epsilon(bad)


@pytest.mark.parametrize("bad", [-1e-9, 1.0, math.nan])
def test_bad_deltas_are_refused(bad):
    with pytest.raises(ValueError, match="delta is"):
        laplace_epsilon(bad, noise_multiplier=1.0)
