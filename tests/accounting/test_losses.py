"""Moment generating functions of the losses against the mechanisms' own densities, integrated by mpmath."""

import math

import mpmath as mp
import numpy as np
import pytest

from asfl_privacy.accounting.losses import Losses, characteristic, log_moment, log_moment_error


def make(*classes):
    eps, n, k = zip(*classes, strict=True)
    return Losses(epsilons=np.array(eps, float), counts=np.array(n, float), num_classes=np.array(k, float))


def laplace_moment(s, eps):
    """∫ p·(p/q)^s with p, q two Laplace densities of scale 1 at distance eps: no formula for the loss is used."""
    p = lambda x: mp.exp(-abs(x)) / 2  # noqa: E731
    ratio = lambda x: mp.exp(s * (abs(x - eps) - abs(x)))  # noqa: E731
    return mp.quad(lambda x: p(x) * ratio(x), [-mp.inf, 0, eps / 2, eps, mp.inf])


def response_moment(s, eps, k):
    """Σ p·(p/q)^s over the k outputs, for the inputs 0 and 1."""
    weights = [[mp.exp(eps) if output == given else mp.mpf(1) for output in range(k)] for given in (0, 1)]
    p, q = ([w / mp.fsum(row) for w in row] for row in weights)
    return mp.fsum(a * mp.exp(s * mp.log(a / b)) for a, b in zip(p, q, strict=True))


def moment(s, eps, k):
    eps = mp.mpf(eps)
    return response_moment(s, eps, k) if k else laplace_moment(s, eps)


CASES = [(0.01, 0), (0.3, 0), (2.0, 0), (9.0, 0), (0.01, 2), (1.0, 2), (1.0, 10), (0.2, 300), (7.0, 3)]


@pytest.mark.parametrize(("eps", "k"), CASES)
@pytest.mark.parametrize("theta", [1e-3, 0.4, 3.0, 40.0])
def test_the_moment_is_that_of_the_densities(eps, k, theta):
    """Catches: a wrong atom, the density's factor 1/4, k − 1 for k − 2 neutral outputs."""
    losses = make((eps, 7, k))
    with mp.workdps(30):
        expected = 7 * (mp.log(moment(mp.mpf(theta), eps, k)) - mp.mpf(theta) * mp.mpf(eps))
        got = log_moment(losses, np.array([theta]))[0]
        assert abs(got - expected) <= log_moment_error(losses)


@pytest.mark.parametrize(("eps", "k"), CASES)
def test_the_characteristic_function_is_that_of_the_densities(eps, k):
    """Catches: an error bound that leaves out the powers or the turning of large nodes."""
    theta, nodes = 2.0, np.array([0.0, 0.7, 5.0, 60.0])
    with mp.workdps(25):
        at_theta = moment(mp.mpf(theta), eps, k)
        exact = [moment(mp.mpc(theta, t), eps, k) / at_theta * mp.exp(-1j * mp.mpf(t) * eps) for t in nodes]
        for n in (1, 12, 10**6):
            got, error = characteristic(make((eps, n, k)), theta, nodes)
            assert error < 1e-6
            for value, ratio in zip(got, exact, strict=True):
                assert abs(mp.mpmathify(complex(value)) - ratio**n) <= error


def test_the_reverse_direction_has_the_same_moments():
    """δ of (P, Q) and (Q, P) agree: E_Q[(q/p)^s] = E_P[(p/q)^s] for both pairs, by exchange of 0 and 1."""
    with mp.workdps(25):
        for eps in (0.3, 2.0):
            p, q = (lambda x: mp.exp(-abs(x)) / 2), (lambda x, e=eps: mp.exp(-abs(x - e)) / 2)
            reverse = mp.quad(lambda x, p=p, q=q: q(x) * (q(x) / p(x)) ** 1.5, [-mp.inf, 0, eps, mp.inf])
            assert mp.almosteq(reverse, laplace_moment(mp.mpf("1.5"), eps), 1e-15)


def test_classes_multiply():
    """Catches: a class lost when the small nodes are dropped, or counts taken once."""
    both = make((0.5, 3, 0), (1.0, 2, 5))
    nodes = np.linspace(0.0, 9.0, 50)
    got, error = characteristic(both, 1.3, nodes)
    parts = [characteristic(make(one), 1.3, nodes)[0] for one in [(0.5, 1, 0)] * 3 + [(1.0, 1, 5)] * 2]
    np.testing.assert_allclose(got, np.prod(parts, axis=0), rtol=0.0, atol=10 * error)


def test_too_many_releases_prove_nothing():
    assert characteristic(make((1.0, 10**12, 0)), 1.0, np.array([0.0, 1.0]))[1] == math.inf
