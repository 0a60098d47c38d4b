"""δ by Fourier inversion against closed forms, at sharp, coarse and badly placed contours."""

from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest

from asfl_privacy.accounting.fourier import (
    best_theta,
    chernoff_gap,
    log_delta_lower,
    log_delta_upper,
    make_contour,
)
from asfl_privacy.accounting.losses import Losses

NO_GAUSSIAN = (Fraction(0), Fraction(0))


def make(eps, n=1, k=0):
    return Losses(epsilons=np.array([eps]), counts=np.array([float(n)]), num_classes=np.array([float(k)]))


def gaussian_delta(epsilon, mu):
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def laplace_delta(epsilon, eps):
    """1 − e^{(ε − ε0)/2} between −ε0 and ε0."""
    return 1 - mp.exp((epsilon - eps) / 2) if abs(epsilon) < eps else max(mp.mpf(0), 1 - mp.exp(epsilon))


def joint_delta(epsilon, eps, k, mu):
    """One draw of k-ary randomised response and one Gaussian release: three terms."""
    total = mp.exp(eps) + k - 1
    parts = [(eps, mp.exp(eps)), (-eps, 1), (0, k - 2)]
    return mp.fsum(weight / total * gaussian_delta(epsilon - loss, mu) for loss, weight in parts)


@pytest.mark.parametrize("smoothing", [1e-5, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("factor", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("eps", [0.05, 1.0, 12.0])
def test_one_laplace_release_lies_between_the_bounds(eps, factor, smoothing):
    """Catches: the excess v·f_v halved twice or left out, the aliases not subtracted, the sign of the turn."""
    losses = make(eps)
    for share in (1e-4, 0.03, 0.3, 0.8):
        gap = share * eps
        theta = factor * best_theta(losses, 0.0, gap)
        contour = make_contour(losses, mu_squared=NO_GAUSSIAN, theta=theta, gap=gap, smoothing=smoothing)
        for other in (gap, 0.5 * gap, min(2.0 * gap, eps)):
            with mp.workdps(30):
                exact = mp.log(laplace_delta(mp.mpf(eps) - mp.mpf(other), mp.mpf(eps)))
                assert log_delta_lower(contour, other) <= exact <= log_delta_upper(contour, other)


@pytest.mark.parametrize("mu", ["0.01", "0.5", "3", "40"])
@pytest.mark.parametrize("eps", [0.05, 1.0, 12.0])
def test_response_with_gaussian_lies_between_the_bounds(eps, mu):
    """Catches: the Gaussian's mean μ²/2 left out or its sign turned."""
    square = Fraction(mu) ** 2
    losses, variance = make(eps, k=5), float(square)
    for log_delta in (-1.0, -11.5, -30.0):
        gap = chernoff_gap(losses, variance, log_delta)
        if gap > eps:
            continue
        theta = best_theta(losses, variance, gap)
        contour = make_contour(losses, mu_squared=(square, square), theta=theta, gap=gap, smoothing=1e-3)
        with mp.workdps(60):
            exact = mp.log(
                joint_delta(
                    mp.mpf(eps) - mp.mpf(gap), mp.mpf(eps), 5, mp.sqrt(mp.mpf(square.numerator) / square.denominator)
                )
            )
            low, high = log_delta_lower(contour, gap), log_delta_upper(contour, gap)
            assert low <= exact <= high
            assert high - low <= 5e-3


def test_chernoff_is_above():
    """The search begins on the safe side: δ there is at most the one asked."""
    losses = make(0.1, 100)
    gap = chernoff_gap(losses, 0.0, -11.5)
    contour = make_contour(losses, mu_squared=NO_GAUSSIAN, theta=best_theta(losses, 0.0, gap), gap=gap, smoothing=1e-3)
    assert log_delta_lower(contour, gap) <= -11.5


def test_unbounded_smoothing_claims_no_lower_bound():
    contour = make_contour(make(1.0, 5), mu_squared=NO_GAUSSIAN, theta=1e-7, gap=1.0, smoothing=1e-2)
    assert log_delta_lower(contour, 1.0) == -np.inf
    assert log_delta_upper(contour, 1.0) <= 0.0
