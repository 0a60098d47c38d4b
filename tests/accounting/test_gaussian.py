"""Gaussian closed forms against written values, mpmath and the hockey-stick integral itself."""

import math
from fractions import Fraction

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.gaussian import (
    classic_noise_multiplier,
    composed_gaussian_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)

EPSILONS = [1e-3, 1e-2, 0.1, 0.5, 1.0, 4.0, 16.0, 100.0]
DELTAS = [1e-2, 1e-5, 1e-8, 1e-12]


def exact_delta(epsilon, mu):
    """Balle & Wang (2018), Theorem 8, at 80 digits."""
    with mp.workdps(80):
        epsilon, mu = mp.mpf(epsilon), mp.mpf(mu)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def test_calibration_agrees_with_the_written_values(golden, agrees):
    for row in golden["calibration"]:
        assert agrees(gaussian_noise_multiplier(row["epsilon"], delta=row["delta"]), row["analytic"]), row
        if "classic" in row:
            assert agrees(classic_noise_multiplier(row["epsilon"], delta=row["delta"]), row["classic"]), row
        if "classic_true_delta" in row:
            multiplier = float(row["classic_formula"])
            true_delta = gaussian_delta(row["epsilon"], noise_multiplier=multiplier)
            assert true_delta == pytest.approx(float(row["classic_true_delta"]), rel=0.02)


def test_composition_agrees_with_the_written_values(golden, agrees):
    for row in golden["composition"]:
        exact = row["num_releases"] / Fraction(row["noise_multiplier"]) ** 2
        assert agrees(composed_gaussian_epsilon(exact, delta=1e-5).high, row["epsilon"]), row


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_calibration_returns_the_safe_end_within_1e12(epsilon, delta):
    """Catches: returning the lower end of the bisection; log_ndtr's cancellation at small epsilon (error 1e-11)."""
    z = gaussian_noise_multiplier(epsilon, delta=delta)
    with mp.workdps(80):
        assert exact_delta(epsilon, 1 / mp.mpf(z)) <= delta
        assert exact_delta(epsilon, 1 / (mp.mpf(z) * (1 - mp.mpf("1e-12")))) > delta


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1e-3, 0.3, 1.0, 7.0, 60.0, 1000.0])
@pytest.mark.parametrize("mu", [1e-5, 1e-3, 0.2, 0.499999, 0.5, 1.0, 6.0, 40.0, 300.0])
def test_delta_is_never_below_the_exact_one(epsilon, mu):
    """Catches: dropping the rounding error bound, and the branch change at mu = 0.5."""
    z = 1.0 / mu
    exact = exact_delta(epsilon, 1 / mp.mpf(z))
    got = gaussian_delta(epsilon, noise_multiplier=z)
    assert got >= exact
    if exact > 1e-280:
        assert got <= exact * (1 + mp.mpf("1e-9"))
    assert 0.0 < got <= 1.0


@pytest.mark.parametrize(("epsilon", "mu"), [(1.0, 0.268), (0.1, 1.0), (4.0, 2.0), (0.0, 0.5)])
def test_delta_equals_the_hockey_stick_integral(epsilon, mu):
    """A second method: integrate (p − e^ε q)₊ over the densities."""
    with mp.workdps(30):
        p, q = (lambda x: mp.npdf(x, mu, 1)), (lambda x: mp.npdf(x, 0, 1))
        start = mp.mpf(epsilon) / mu + mp.mpf(mu) / 2  # where the densities' ratio is e^ε
        points = [start, start + 2, start + 5, start + 10, start + 20]
        integral = mp.quad(lambda x: p(x) - mp.exp(epsilon) * q(x), points)
    assert gaussian_delta(epsilon, noise_multiplier=1.0 / mu) == pytest.approx(float(integral), rel=1e-10)


@pytest.mark.parametrize("delta", [0.9, *DELTAS, 1e-100, 1e-250])
@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.27, 1.0, 10.0, 31.6, 200.0])
def test_the_epsilon_bracket_holds_the_exact_value(delta, mu):
    """Catches: swapping the rounding directions of μ or of log δ."""
    square = Fraction(mu) ** 2
    bracket = composed_gaussian_epsilon(square, delta=delta)
    assert exact_delta(bracket.high, mu) <= delta
    assert 0.0 <= bracket.low <= bracket.high
    if bracket.low > 0.0:
        assert exact_delta(bracket.low, mu) >= delta
        assert bracket.high - bracket.low <= 1e-9 * bracket.high + 1e-12
    else:
        assert bracket.high <= 1e-9 or exact_delta(0.0, mu) <= delta * 1.000001


def test_epsilon_is_never_negative():
    """Catches: solving for the root without the floor at 0 (μ=1, δ=.9)."""
    assert gaussian_epsilon(0.9, noise_multiplier=1.0) == 0.0


def test_zero_epsilon_needs_the_closed_form_multiplier():
    for delta in (1e-2, 1e-5, 1e-12):
        with mp.workdps(40):
            half = mp.mpf(delta) / 2  # z = 1/(2 Φ⁻¹(½ + δ/2)), and Φ⁻¹(½ + x) = √2·erfinv(2x)
            expected = 1 / (2 * mp.sqrt(2) * mp.erfinv(2 * half))
        z = gaussian_noise_multiplier(0.0, delta=delta)
        assert expected <= z <= expected * (1 + mp.mpf("1e-12"))
        assert gaussian_epsilon(delta, noise_multiplier=z) == 0.0


def test_a_thousand_releases_at_multiplier_one_do_not_break_the_bracket():
    assert composed_gaussian_epsilon(Fraction(1000), delta=1e-5).high == pytest.approx(633.9, abs=0.05)
    assert gaussian_noise_multiplier(1e-3, delta=1e-12) >= 5412.3


@settings(max_examples=60, deadline=None)
@given(
    epsilon=st.floats(1e-3, 100.0),
    log_delta=st.floats(-12.0, -2.0),
    num_releases=st.integers(1, 5000),
)
def test_calibration_never_overspends(epsilon, log_delta, num_releases):
    """Catches: dividing by √T instead of multiplying, rounding z down, leaving out the last nudge."""
    delta = 10.0**log_delta
    z = gaussian_noise_multiplier(epsilon, delta=delta, num_releases=num_releases)
    spent = composed_gaussian_epsilon(num_releases / Fraction(z) ** 2, delta=delta).high
    assert epsilon * (1 - 1e-9) <= spent <= epsilon


@settings(max_examples=60, deadline=None)
@given(z=st.floats(0.05, 1e4), factor=st.floats(1.001, 10.0), log_delta=st.floats(-12.0, -1.0))
def test_more_noise_and_more_delta_mean_less_epsilon(z, factor, log_delta):
    delta = 10.0**log_delta
    epsilon = gaussian_epsilon(delta, noise_multiplier=z)
    assert gaussian_epsilon(delta, noise_multiplier=z * factor) <= epsilon
    assert gaussian_epsilon(min(0.99, delta * factor), noise_multiplier=z) <= epsilon


def test_a_fraction_of_a_release_counts_as_a_whole_one():
    """Catches: rounding counts down."""
    assert gaussian_noise_multiplier(1.0, delta=1e-5, num_releases=2.5) == gaussian_noise_multiplier(
        1.0, delta=1e-5, num_releases=3
    )


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 16.0])
def test_classic_is_refused_from_epsilon_one(epsilon):
    """Catches: dropping the refusal, which would hand out .303 at ε=16, δ=1e-5."""
    with pytest.raises(ValueError, match="proven for 0 < epsilon < 1"):
        classic_noise_multiplier(epsilon, delta=1e-5)


@settings(max_examples=40, deadline=None)
@given(epsilon=st.floats(1e-3, 0.999), log_delta=st.floats(-12.0, -0.001))
def test_classic_keeps_its_promise_or_is_refused(epsilon, log_delta):
    delta = 10.0**log_delta
    try:
        z = classic_noise_multiplier(epsilon, delta=delta)
    except ValueError as error:
        assert "more than asked" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert exact_delta(epsilon, 1 / mp.mpf(z)) <= delta


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf, True, "1", None])
def test_bad_multipliers_are_refused_in_one_line(bad):
    with pytest.raises(ValueError, match="noise_multiplier is") as caught:
        gaussian_epsilon(1e-5, noise_multiplier=bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, 1.0, 2.0, -1e-5, math.nan, math.inf, 1e-300, True])
def test_bad_deltas_are_refused_in_one_line(bad):
    with pytest.raises(ValueError, match="delta is") as caught:
        gaussian_noise_multiplier(1.0, delta=bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "1"])
def test_bad_epsilons_are_refused(bad):
    with pytest.raises(ValueError, match="epsilon is"):
        gaussian_noise_multiplier(bad, delta=1e-5)


def test_extreme_multipliers_stay_on_the_safe_side():
    assert gaussian_epsilon(1e-5, noise_multiplier=1e-200) == math.inf
    assert gaussian_epsilon(1e-5, noise_multiplier=1e-100) >= 0.5e200
    assert gaussian_epsilon(1e-5, noise_multiplier=1e300) == 0.0
    assert gaussian_delta(1.0, noise_multiplier=1e-310) == 1.0
    assert 0.0 < gaussian_delta(1.0, noise_multiplier=1e9) < 1e-300


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_delta_exceeds_the_exact_one_by_at_most_1e12_in_the_stated_range(epsilon, delta):
    """Catches: an error bound that is safe but loose, and a promise of digits that are not there."""
    z = gaussian_noise_multiplier(epsilon, delta=delta)
    with mp.workdps(80):
        exact = exact_delta(epsilon, 1 / mp.mpf(z))
        assert exact <= gaussian_delta(epsilon, noise_multiplier=z) <= exact * (1 + mp.mpf("1e-12"))


def test_delta_far_outside_that_range_is_still_an_upper_bound():
    """ε=3.5e7, δ=4e-175: the excess is beyond 1e-12, and the docstring says so."""
    z = gaussian_noise_multiplier(3.5e7, delta=4e-175)
    with mp.workdps(80):
        exact = exact_delta(3.5e7, 1 / mp.mpf(z))
    assert exact <= gaussian_delta(3.5e7, noise_multiplier=z) <= exact * (1 + mp.mpf("1e-9"))
