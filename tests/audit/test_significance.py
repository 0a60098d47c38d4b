"""p-values and bounds against mpmath, defining properties and scipy's own exact laws."""

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from asfl_privacy.audit.significance import (
    cosines,
    distribution,
    kolmogorov_smirnov,
    normal_scores,
    rate_up,
    relative_scale,
    tail_count,
    too_aligned,
    too_small,
)


@pytest.mark.parametrize(
    ("count", "total"), [(1, 1e-12), (64, 20.0), (4096, 3500.0), (131072, 128000.0), (131072, 129500.0)]
)
def test_scale_p_values_agree_with_mpmath(count, total):
    """Catches: a χ² with n − 1 degrees, or an approximation that is off in the far tail."""
    with mpmath.workdps(40):
        gaussian = float(mpmath.gammainc(mpmath.mpf(count) / 2, 0, mpmath.mpf(total) / 2, regularized=True))
        laplace = float(mpmath.gammainc(count, 0, mpmath.mpf(total), regularized=True))
    assert float(too_small(np.array(total), count=count, family="gaussian")) == pytest.approx(gaussian, rel=1e-6)
    assert float(too_small(np.array(total), count=count, family="laplace")) == pytest.approx(laplace, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "factor", "alpha"), [(390, 0.9, 0.05), (11, 0.5, 0.05), (1709, 0.9, 1e-6), (50, 0.5, 1e-6)]
)
def test_the_scale_test_has_its_known_power(count, factor, alpha):
    """Expected: the least counts for 90 % power, from the χ² law. Catches: σ in place of σ², a two-sided test."""
    draws = factor * np.random.default_rng(5).standard_normal((4000, count))
    power = float(np.mean(too_small((draws**2).sum(axis=1), count=count, family="gaussian") < alpha))
    assert power == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_scale_p_values_are_uniform_for_honest_noise(family):
    draws = getattr(np.random.default_rng(1), "normal" if family == "gaussian" else "laplace")(size=(4000, 16))
    totals = (draws**2 if family == "gaussian" else np.abs(draws)).sum(axis=1)
    assert stats.kstest(too_small(totals, count=16, family=family), "uniform").pvalue > 1e-4
    assert relative_scale(totals.mean(), count=16, family=family) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("count", [2, 3, 64, 4096])
def test_cosine_p_values_are_uniform_whatever_the_other_vector(count):
    """Catches: n where n − 1 is due in the Beta law."""
    stream = np.random.default_rng(2)
    other = stream.standard_cauchy(count)
    values = cosines(stream.standard_normal((4000, count)), np.broadcast_to(other, (4000, count)))
    assert stats.kstest(too_aligned(values, count=count), "uniform").pvalue > 1e-4


def test_cosines_at_the_ends():
    assert float(too_aligned(np.array(1.0), count=64)) == 0.0
    assert float(too_aligned(np.array(1.0), count=1)) == 1.0
    assert float(cosines(np.zeros(3), np.ones(3))) == 0.0
    assert (
        np.isnan(cosines(np.array([np.nan, 1.0]), np.ones(2)))
        or float(cosines(np.array([np.nan, 1.0]), np.ones(2))) == 0
    )


@pytest.mark.parametrize("x", [-40.0, -5.0, -0.3, 0.0, 1e-9, 2.0, 30.0])
def test_normal_scores_of_laplace_agree_with_mpmath(x):
    """Catches: 1 − F in the upper tail, which is 0 beyond 37."""
    with mpmath.workdps(60):
        score = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.exp(-abs(mpmath.mpf(x))))
    assert float(normal_scores(np.array(x), family="laplace")) == pytest.approx(
        np.sign(x) * float(score), rel=1e-9, abs=1e-15
    )


def test_kolmogorov_smirnov_bounds_the_exact_p_value():
    stream = np.random.default_rng(3)
    for count in (10, 1000):
        for shift in (0.0, 0.1, 0.5):
            sample = stream.normal(shift, size=count)
            gap, p_value = kolmogorov_smirnov(sample, family="gaussian")
            exact = stats.kstest(sample, "norm", method="exact")
            assert gap == pytest.approx(exact.statistic, abs=1e-12)
            assert p_value >= exact.pvalue * (1.0 - 1e-9)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_tails_hold_the_probability_named(family):
    sample = special.ndtri((np.arange(100_000) + 0.5) / 100_000)
    if family == "laplace":
        sample = stats.laplace.ppf((np.arange(100_000) + 0.5) / 100_000)
    assert tail_count(sample, probability=1e-3, family=family) == (100, 1.0)
    assert tail_count(0.9 * sample, probability=1e-3, family=family)[1] < 1e-3
    assert tail_count(1.2 * sample, probability=1e-3, family=family)[1] < 1e-3
    assert float(distribution(np.array(0.0), family=family)) == 0.5


@pytest.mark.parametrize("alpha", [0.05, 1e-8])
@pytest.mark.parametrize(("count", "trials"), [(0, 100), (7, 100), (99, 100), (4000, 32768)])
def test_a_rate_is_bounded_by_its_defining_equation(count, trials, alpha):
    """At the bound, as few successes have probability alpha. Catches: a one-sided bound at 2·alpha, or the lower one."""
    bound = float(rate_up(np.array(count), trials=trials, alpha=alpha))
    assert stats.binom.cdf(count, trials, bound) == pytest.approx(alpha, rel=1e-5)


def test_a_rate_of_all_is_bounded_by_one():
    assert float(rate_up(np.array(5), trials=5, alpha=0.05)) == 1.0
