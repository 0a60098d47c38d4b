"""Observed sampling against the mixture summed by mpmath."""

import math
from fractions import Fraction

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.sampled import sampled_epsilon


def mixture_delta(epsilon, z, rounds, q):
    """Σ_k Binom(T, q)(k)·δ of k Gaussian releases, every k counted."""
    epsilon, q, total = mp.mpf(epsilon), mp.mpf(q), mp.mpf(0)
    for k in range(1, rounds + 1):
        mu = mp.sqrt(k) / mp.mpf(z)
        delta = mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)
        total += mp.binomial(rounds, k) * q**k * (1 - q) ** (rounds - k) * delta
    return total


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-5, 1e-10, 1e-14, 1e-100])
@pytest.mark.parametrize(
    ("z", "rounds", "q"),
    [(10.0, 100, 0.1), (1.0, 40, 0.5), (0.01, 20, 0.3), (3.0, 300, 0.01), (1e4, 30, 0.9), (2.0, 1, 0.2)],
)
def test_the_bracket_holds_the_exact_mixture(z, rounds, q, delta):
    """Catches: the mean of k in place of the mean of δ, √k for k, a tail left out of the upper end."""
    bracket = sampled_epsilon(z, num_rounds=rounds, sampling_probability=q, delta=delta)
    with mp.workdps(60):
        assert mixture_delta(bracket.high, z, rounds, q) <= delta
        assert bracket.low == 0.0 or mixture_delta(bracket.low, z, rounds, q) >= delta
    assert bracket.high - bracket.low <= 1e-6 * bracket.high


@pytest.mark.parametrize(("z", "rounds", "q"), [(15.0, 1200, 0.4)])
def test_binned_counts_hold_the_exact_mixture(z, rounds, q):
    """354 counts matter here, some two to a bin. Catches: the bins' lower edges used for the upper end."""
    bracket = sampled_epsilon(z, num_rounds=rounds, sampling_probability=q, delta=1e-6)
    with mp.workdps(30):
        assert mixture_delta(bracket.high, z, rounds, q) <= 1e-6 <= mixture_delta(bracket.low, z, rounds, q)
    assert bracket.high - bracket.low <= 2e-3 * bracket.high


@settings(max_examples=20, deadline=None)
@given(
    z=st.floats(0.05, 1e3), rounds=st.integers(1, 10**6), q=st.floats(1e-9, 0.999), log_delta=st.floats(-12.0, -0.05)
)
def test_it_lies_between_nothing_and_every_release(z, rounds, q, log_delta):
    delta = 10.0**log_delta
    bracket = sampled_epsilon(z, num_rounds=rounds, sampling_probability=q, delta=delta)
    everything = composed_gaussian_epsilon(rounds / Fraction(z) ** 2, delta=delta)
    assert 0.0 <= bracket.low <= bracket.high
    assert bracket.low <= everything.high
    assert bracket.high <= everything.high * (1.0 + 1e-3) + 1e-9
    more = sampled_epsilon(z, num_rounds=rounds, sampling_probability=min(1.0, 1.5 * q), delta=delta)
    assert more.high >= bracket.low


def test_certain_receipt_is_the_closed_form_and_none_is_free():
    """Catches: a bracket error at (1, 1000, q=1), where the closed form is exact."""
    certain = sampled_epsilon(1.0, num_rounds=1000, sampling_probability=1, delta=1e-5)
    assert certain == composed_gaussian_epsilon(Fraction(1000), delta=1e-5)
    assert sampled_epsilon(1.0, num_rounds=1000, sampling_probability=0.0, delta=1e-5).high == 0.0


def test_nearly_certain_receipt_is_close_to_the_closed_form():
    close = sampled_epsilon(5.0, num_rounds=1000, sampling_probability=1.0 - 1e-12, delta=1e-5)
    assert close.high == pytest.approx(composed_gaussian_epsilon(Fraction(1000, 25), delta=1e-5).high, rel=1e-6)


def test_extremes_stay_ordered():
    for z, rounds, q in [
        (100.0, 10**9, 0.5),
        (1.0, 10**9, 1e-9),
        (1e-200, 10, 0.5),
        (1e200, 10, 0.5),
        (1.0, 10**6, 5e-324),
    ]:
        bracket = sampled_epsilon(z, num_rounds=rounds, sampling_probability=q, delta=1e-10)
        assert 0.0 <= bracket.low <= bracket.high
    assert sampled_epsilon(1.0, num_rounds=10, sampling_probability=0.5, delta=1e-280).high < math.inf


def test_bad_values_are_refused_in_one_line():
    good = {"num_rounds": 10, "sampling_probability": 0.1, "delta": 1e-5}
    for name, bads in {
        "num_rounds": [0, -1, 2.5, 10**10, True],
        "sampling_probability": [-0.1, 1.1, math.nan, math.inf, "1"],
        "delta": [0.0, 1.0, math.nan],
    }.items():
        for bad in bads:
            with pytest.raises(ValueError, match=f"{name} is") as caught:
                sampled_epsilon(1.0, **{**good, name: bad})
            assert "\n" not in str(caught.value)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier is"):
            sampled_epsilon(bad, **good)
