"""The exact ε that accountants are compared with: against brute force, by other formulas."""

import itertools
import math

import mpmath as mp
import pytest


def slow_losses(*, eps, n, k):
    """Loss → probability, output by output of every draw."""
    total = mp.exp(eps) + k - 1
    one = [(mp.mpf(eps), mp.exp(eps) / total), (-mp.mpf(eps), 1 / total), (mp.mpf(0), mp.mpf(k - 2) / total)]
    found = {}
    for draws in itertools.product(one, repeat=n):
        steps = sum(1 if loss > 0 else -1 if loss < 0 else 0 for loss, _ in draws)
        found[steps] = found.get(steps, 0) + mp.fprod(weight for _, weight in draws)
    return found


@pytest.mark.parametrize(("eps", "n", "k"), [(1.0, 7, 10), (0.25, 6, 3), (2.0, 8, 2)])
def test_losses_are_those_of_every_sequence_of_outputs(scripts, eps, n, k):
    """Catches: k − 1 for k − 2 neutral outputs, and a recurrence off by one."""
    with mp.workdps(scripts.truth.DIGITS):
        atoms = scripts.truth.response_losses(scripts.accountants.response(1 / eps, n, k))
        expected = slow_losses(eps=eps, n=n, k=k)
        assert [loss for loss, _ in atoms] == sorted((loss for loss, _ in atoms), reverse=True)
        for loss, weight in atoms:
            assert abs(weight - expected[round(float(loss / eps))]) < mp.mpf(10) ** -50
        assert abs(mp.fsum(weight for _, weight in atoms) - 1) < mp.mpf(10) ** -50


@pytest.mark.parametrize(("z", "n", "k"), [(1.0, 3000, 10), (10.0, 3000, 2), (0.2, 800, 50)])
def test_long_recurrences_lose_no_digits(scripts, z, n, k):
    """They sum to one, have the mean n·ε0·(p − q), and P and Q exchange: w(−l) = e^{−l}·w(l)."""
    with mp.workdps(scripts.truth.DIGITS):
        atoms = scripts.truth.response_losses(scripts.accountants.response(z, n, k))
        eps = 1 / mp.mpf(z)
        assert abs(mp.fsum(weight for _, weight in atoms) - 1) < mp.mpf(10) ** -40
        mean = n * eps * mp.expm1(eps) / (mp.exp(eps) + k - 1)
        assert abs(mp.fsum(loss * weight for loss, weight in atoms) - mean) < mp.mpf(10) ** -30
        for (loss, weight), (_, reverse) in zip(atoms[:n:50], atoms[::-1][:n:50], strict=True):
            assert mp.almosteq(reverse, mp.exp(-loss) * weight, mp.mpf(10) ** -40)


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-10])
def test_the_closed_form_between_two_losses_is_the_root(scripts, delta):
    with mp.workdps(scripts.truth.DIGITS):
        atoms = scripts.truth.response_losses(scripts.accountants.response(2.0, 30, 5))
        epsilon = scripts.truth.atoms_epsilon(atoms, delta=mp.mpf(delta))
        at = mp.fsum(weight * max(mp.mpf(0), 1 - mp.exp(epsilon - loss)) for loss, weight in atoms)
        assert abs(at - delta) < mp.mpf(10) ** -45
    assert scripts.truth.exact_epsilon([scripts.accountants.response(2.0, 1, 5)], delta=0.9) == 0.0


def test_one_gaussian_with_one_label_is_the_integral_over_both(scripts):
    """By hand-made quadrature of the mixture's hockey stick over the Gaussian's output, for each answer of the label."""
    events = [scripts.accountants.gaussian(2.0, 3), scripts.accountants.response(1.0, 1, 4)]
    epsilon = scripts.truth.exact_epsilon(events, delta=1e-3)
    with mp.workdps(20):
        mu, total = mp.sqrt(3) / 2, mp.e + 3
        answers = [(mp.e / total, 1 / total), (1 / total, mp.e / total), (2 / total, 2 / total)]

        def excess(x):
            p, q = mp.npdf(x, mu), mp.npdf(x)
            return mp.fsum(max(mp.mpf(0), a * p - mp.exp(epsilon) * b * q) for a, b in answers)

        kinks = sorted((epsilon - mp.log(a / b)) / mu + mu / 2 for a, b in answers)
        assert mp.quad(excess, [-12, *kinks, 14]) == pytest.approx(1e-3, rel=1e-10)


def test_what_has_no_finite_formula_has_no_exact_value(scripts):
    laplace, response = scripts.accountants.laplace, scripts.accountants.response
    assert scripts.truth.exact_epsilon([laplace(1.0, 2)], delta=1e-5) is None
    assert scripts.truth.exact_epsilon([response(1.0, 2, 2), response(2.0, 2, 2)], delta=1e-5) is None


@pytest.mark.parametrize(("z", "k"), [(1.0, 10), (10.0, 2), (0.5, 3)])
def test_the_parameter_of_dp_accountings_randomised_response_gives_the_same_odds(scripts, z, k):
    """It draws uniformly with this probability and else answers truly, so its odds are (1 − p + p/k) to p/k."""
    noise = scripts.peers.response_noise(scripts.accountants.response(z, 1, k))
    assert math.log((1 - noise + noise / k) / (noise / k)) == pytest.approx(1 / z, rel=1e-12)
