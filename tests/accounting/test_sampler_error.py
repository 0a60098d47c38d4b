"""The charge for an inexact sampler against exact roots and against distributions by hand."""

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from asfl_privacy.accounting import sampler_error
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.sampler_error import charged_epsilon, discounted_epsilon, escape_probability


def exact_charge(*, mu, delta, excess, tail):
    """ε0 + E at the least root ε0 of e^(E/2)·(δ(ε0) + e^ε0·τ) = δ, δ(·) of a Gaussian, at 40 digits."""
    with mp.workdps(40):
        mu, excess, tail, delta = (mp.mpf(value) for value in (mu, excess, tail, delta))

        def too_little(epsilon):
            ideal = mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)
            return mp.exp(excess / 2) * (ideal + mp.exp(epsilon) * tail) > delta

        low, high = mp.mpf(0), mp.mpf(0)
        while too_little(high):
            high += mp.mpf("0.01")
        low = max(mp.mpf(0), high - mp.mpf("0.01"))
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if too_little(middle) else (low, middle)
        return high + excess


@pytest.mark.parametrize(
    ("mu", "excess", "tail"),
    [(1.0, 0.0, 0.0), (1.0, 0.01, 0.0), (1.0, 0.0, 1e-12), (0.5, 1e-9, 1e-8), (1.0, 0.1, 2e-8), (3.0, 1e-6, 1e-15)],
)
def test_the_charge_is_the_least_root(mu, excess, tail):
    """Catches: E added to ε but not to δ, τ without its factor e^ε0, τ once where e^(E/2) is due."""

    def ideal(delta):
        return composed_gaussian_epsilon(Fraction(mu) ** 2, delta=delta).high

    found = charged_epsilon(ideal, delta=1e-5, excess=excess, tail=tail)
    exact = exact_charge(mu=mu, delta=1e-5, excess=excess, tail=tail)
    assert exact <= mp.mpf(found) <= exact * (1 + mp.mpf("1e-6"))


@settings(max_examples=200, deadline=None)
@given(
    ideal=st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0)), min_size=2, max_size=4),
    bends=st.lists(st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0)), min_size=4, max_size=4),
    excess=st.floats(0.0, 0.3),
    lost=st.floats(0.0, 0.02),
    delta=st.sampled_from([0.05, 0.2, 0.5]),
    num_releases=st.sampled_from([1, 2, 3]),
)
def test_no_drawn_distribution_within_the_declared_error_exceeds_the_charge(
    ideal, bends, excess, lost, delta, num_releases
):
    """Products of distributions with one outcome more that only ideal noise reaches. Catches a charge that is too small."""
    p, q = (np.array(column) for column in zip(*ideal, strict=True))
    pair = [drawn_and_ideal(values, [bend[side] for bend in bends], excess, lost) for side, values in enumerate((p, q))]
    declared = [errors_of(drawn, exact) for drawn, exact in pair]
    e, tau = max(error[0] for error in declared), max(error[1] for error in declared)
    drawn, exact = (tuple(powers(side[which], num_releases) for side in pair) for which in (0, 1))
    found = charged_epsilon(
        lambda rest: largest_epsilon(*exact, rest), delta=delta, excess=num_releases * e, tail=num_releases * tau
    )
    assert largest_epsilon(*drawn, delta) <= found + 1e-9
    low = discounted_epsilon(
        lambda rest: largest_epsilon(*exact, min(rest, 1.0)),
        delta=delta,
        excess=num_releases * e,
        tail=num_releases * tau,
    )
    assert low <= largest_epsilon(*drawn, delta) + 1e-9


def drawn_and_ideal(values, bends, excess, lost):
    exact = np.append(values / values.sum() * (1.0 - lost), lost)
    bent = np.append(exact[:-1] * np.exp(excess / 4.0 * np.array(bends[: len(values)])), 0.0)
    return bent / bent.sum(), exact


def errors_of(drawn, exact):
    """The least (e, τ) that the two distributions declare: e from reached outcomes, τ for what is left."""
    reached = drawn > 0
    ratio = float(np.max(np.abs(np.log(drawn[reached] / exact[reached]))))
    tau = float(np.maximum(exact - math.exp(ratio) * drawn, 0.0).sum())
    return 2.0 * ratio, tau


def powers(distribution, num_releases):
    found = np.array([1.0])
    for _ in range(num_releases):
        found = np.outer(found, distribution).ravel()
    return found


def largest_epsilon(p, q, delta):
    """The least ε ≥ 0 with Σ (p − e^ε q)₊ ≤ δ, either way round, by bisection."""

    def holds(epsilon):
        return all(np.maximum(a - math.exp(epsilon) * b, 0.0).sum() <= delta for a, b in ((p, q), (q, p)))

    low, high = 0.0, 60.0
    if holds(0.0):
        return 0.0
    if not holds(high):
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def test_a_tail_that_delta_cannot_cover_is_unbounded():
    """Catches: returning the ideal ε where e^ε0·τ alone exceeds δ."""
    assert charged_epsilon(lambda _: 10.0, delta=1e-5, excess=0.0, tail=1e-9) == math.inf
    assert charged_epsilon(lambda _: 800.0, delta=1e-5, excess=0.0, tail=1e-300) == math.inf
    assert charged_epsilon(lambda _: 1.0, delta=1e-5, excess=0.0, tail=1e-9) == 1.0000000000000002
    assert charged_epsilon(lambda _: 1.0, delta=1e-5, excess=2000.0, tail=0.0) == math.inf


def test_an_exact_sampler_costs_nothing():
    assert charged_epsilon(lambda delta: 3.0 + delta, delta=0.25, excess=0.0, tail=0.0) == 3.25
    assert discounted_epsilon(lambda delta: 3.0 + delta, delta=0.25, excess=0.0, tail=0.0) == 3.25
    assert discounted_epsilon(lambda _: 1.0, delta=0.5, excess=1e-3, tail=0.6) == 0.0


def test_escapes_are_those_of_a_gaussian_table_by_integration(monkeypatch):
    """Noise that a shift carries outside a table of K cells, against mpmath: never less, twice it where T is the table's own
    (both sides of the table are counted). Catches: T + s, a missing factor, a T below the table's."""
    with mp.workdps(60):
        for s_cells, reach, shift in ((16, 6, 10), (32, 8, 64), (32, 12, 200)):
            cells = reach * s_cells
            beyond = 2 * mp.ncdf(-(cells + mp.mpf(1) / 2) / s_cells)
            escaped = float(mp.ncdf(-(cells - shift + mp.mpf(1) / 2) / s_cells))
            monkeypatch.setattr(sampler_error, "TABLE_REACH", (cells + 0.5) / s_cells)
            own = escape_probability(float(beyond), multiplier=Fraction(s_cells, shift))
            monkeypatch.undo()
            assert 2 * escaped <= own <= 2.001 * escaped
            assert escape_probability(float(beyond), multiplier=Fraction(s_cells, shift)) >= own
    assert 1e-302 <= escape_probability(1e-302, multiplier=Fraction(1)) < 1e-280


def test_a_large_epsilon_stays_finite_where_noise_cannot_escape():
    """Catches: e^ε·τ alone, by which every total beyond ε = 690 is unbounded."""
    assert charged_epsilon(lambda _: 900.0, delta=1e-5, excess=0.0, tail=1e-302) == math.inf
    assert charged_epsilon(lambda _: 900.0, delta=1e-5, excess=0.0, tail=1e-302, escape=1e-180) == pytest.approx(900.0)
    assert charged_epsilon(lambda _: 900.0, delta=1e-5, excess=0.0, tail=1e-302, escape=1e-4) == math.inf


@pytest.mark.parametrize("shift", [1, 3, 6])
def test_no_drawn_pair_exceeds_the_charge_by_escapes(monkeypatch, shift):
    """A table cut at 5 of σ = 4 cells by brute force: drawn P̃ against drawn Q̃ at the ε charged, and at the ε that a charge
    without escapes would give, which is too small where noise escapes most. Catches: no escape at all."""
    sigma, cells = 4.0, 20
    k = np.arange(-cells, cells + 1)
    weights = ndtr((k + 0.5) / sigma) - ndtr((k - 0.5) / sigma)
    drawn = weights / weights.sum()
    excess = 2 * -math.log(weights.sum())  # the renormalised table exceeds the ideal by this factor in every cell
    tail = 2 * float(ndtr(-(cells + 0.5) / sigma))
    first = np.zeros(2 * cells + 1 + shift)
    second = first.copy()
    first[: 2 * cells + 1], second[shift:] = drawn, drawn
    z = Fraction(int(sigma), shift)
    monkeypatch.setattr(sampler_error, "TABLE_REACH", (cells + 0.5) / sigma)
    escape = escape_probability(tail, multiplier=z)

    def spent(epsilon):
        return np.maximum(first - math.exp(epsilon) * second, 0.0).sum()

    def charged(delta, escape):
        def ideal(rest):
            return composed_gaussian_epsilon(1 / z**2, delta=rest).high

        return charged_epsilon(ideal, delta=delta, excess=excess, tail=1.0, escape=escape)

    for delta in (1e-2, 2 * escape, 1.01 * escape):
        epsilon = charged(delta, escape)
        assert math.isfinite(epsilon)
        assert spent(epsilon) <= delta
    if shift == 6:
        assert spent(charged(escape / 4, 0.0)) > escape / 4
