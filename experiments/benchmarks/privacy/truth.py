"""Exact ε of compositions that have a finite formula, by mpmath at 60 digits: no FFT, no grid, no float in between.

Legend: Gaussian releases together are one with μ² = Σ n/z²; randomised response of n draws with pure ε0 and k classes has
the loss ε0 (probability e^{ε0}/s), −ε0 (1/s) or 0 ((k − 2)/s), s = e^{ε0} + k − 1, in each draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import mpmath as mp

from asfl_privacy.accounting import LossEvent

DIGITS = 60
Atoms = list[tuple[mp.mpf, mp.mpf]]


def exact_epsilon(events: Sequence[LossEvent], *, delta: float) -> float | None:
    """The nearest float to the least ε ≥ 0 with δ(ε) ≤ delta, or None where there is no finite formula here.

    Args:
        events: Gaussians, and randomised response of one kind, or either alone.
        delta: δ in (0, 1).

    Example:
        >>> round(exact_epsilon([LossEvent(mechanism="gaussian", noise_multiplier=10.0, count=100)], delta=1e-5), 3)
        4.377
    """
    gaussians = [event for event in events if event.mechanism == "gaussian"]
    others = [event for event in events if event.mechanism != "gaussian"]
    if len(others) > 1 or any(event.mechanism != "randomized-response" for event in others):
        return None
    if gaussians and others and others[0].count > 100:
        return None  # each step of the search would take that many normal integrals
    with mp.workdps(DIGITS):
        atoms = response_losses(others[0]) if others else [(mp.mpf(0), mp.mpf(1))]
        if not gaussians:
            return float(atoms_epsilon(atoms, delta=mp.mpf(delta)))
        square = sum((event.count / Fraction(event.noise_multiplier) ** 2 for event in gaussians), Fraction(0))
        mu = mp.sqrt(mp.mpf(square.numerator) / square.denominator)
        return float(_bisect(atoms, mu=mu, delta=mp.mpf(delta)))


def response_losses(event: LossEvent) -> Atoms:
    """(loss, probability) of the summed loss, largest loss first.

    The probabilities are the coefficients of (a + b·x + a'·x²)^n, by the three-term recurrence of powers of polynomials
    (Euler), from each end up to the middle: there the positive of the recurrence's two growth rates is the larger one, so
    the wanted solution outgrows every error, and past it the negative one is.
    """
    n, k = event.count, int(event.num_classes or 2)
    eps = 1 / _exact(event.noise_multiplier)
    total = mp.exp(eps) + k - 1
    top, middle, bottom = mp.exp(eps) / total, mp.mpf(k - 2) / total, 1 / total
    up = _power_coefficients(bottom, middle, top, n=n)
    down = _power_coefficients(top, middle, bottom, n=n)
    mass = [*up, *down[-2::-1]]
    return [((index - n) * eps, mass[index]) for index in range(2 * n, -1, -1)]


def _power_coefficients(first: mp.mpf, second: mp.mpf, third: mp.mpf, *, n: int) -> list[mp.mpf]:
    """Coefficients 0 to n of (first + second·x + third·x²)^n: m·first·c_m = Σ_i (i·(n + 1) − m)·p_i·c_{m − i}."""
    found = [first**n]
    for m in range(1, n + 1):
        term = (n + 1 - m) * second * found[m - 1]
        if m >= 2:
            term += (2 * (n + 1) - m) * third * found[m - 2]
        found.append(term / (m * first))
    return found


def atoms_epsilon(atoms: Atoms, *, delta: mp.mpf) -> mp.mpf:
    """The least ε ≥ 0 with Σ w·(1 − e^{ε − loss})₊ ≤ δ: between two losses δ(ε) = A − e^ε·B, solved in closed form."""
    above, shrunk = mp.mpf(0), mp.mpf(0)
    for index, (loss, weight) in enumerate(atoms):
        above, shrunk = above + weight, shrunk + weight * mp.exp(-loss)
        nearest = max(mp.mpf(0), atoms[index + 1][0]) if index + 1 < len(atoms) else mp.mpf(0)
        if above - mp.exp(nearest) * shrunk >= delta:
            return mp.log((above - delta) / shrunk)
        if nearest == 0:
            break
    return mp.mpf(0)


def _bisect(atoms: Atoms, *, mu: mp.mpf, delta: mp.mpf) -> mp.mpf:
    """The root of Σ w·δ_μ(ε − loss) = δ, δ_μ that of the Gaussian (Balle & Wang 2018, Theorem 8)."""

    def excess(epsilon: mp.mpf) -> mp.mpf:
        return mp.fsum(weight * _gaussian_delta(epsilon - loss, mu) for loss, weight in atoms) - delta

    low, high = mp.mpf(0), mp.mpf(1)
    if excess(low) <= 0:
        return low
    while excess(high) > 0:
        low, high = high, 2 * high
    while high - low > mp.mpf(10) ** -18 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _gaussian_delta(epsilon: mp.mpf, mu: mp.mpf) -> mp.mpf:
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def _exact(number: float | Fraction) -> mp.mpf:
    fraction = Fraction(number)
    return mp.mpf(fraction.numerator) / fraction.denominator
