"""What an inexact sampler costs: the ε of drawn noise from the ε of ideal noise.

Legend: E, τ = sums over the releases of one record of the sampler's epsilon_excess and tail_probability; P, Q = ideal
output distributions for two neighbours, P̃, Q̃ = drawn ones; (ε0, δ0) = what is proven of P and Q.

With P̃(S) ≤ e^(E/2)·P(S) and Q(S) ≤ e^(E/2)·Q̃(S) + τ for every S, which single releases add up to (basic composition of
approximate bounds, adaptive choices included),

    P̃(S) ≤ e^(E/2)·(e^ε0·Q(S) + δ0) ≤ e^(ε0+E)·Q̃(S) + e^(E/2)·(δ0 + e^ε0·τ).

The factor e^ε0 is lost where the sampler's error is known outcome by outcome: within a table that reaches T standard
deviations every cell is off by a factor of at most e^(E/2), outside nothing is drawn. An outcome that was drawn from P̃ and
lies outside the table of Q̃ is noise beyond T less the shift s of the neighbour (in standard deviations), of probability
τ' ≤ e^(E/2)·τ·Φ(−(T−s))/Φ(−T) in each coordinate, hence together. Everywhere else Q ≤ e^(E/2)·Q̃, so

    P̃(S) ≤ e^(ε0+E)·Q̃(S) + e^(E/2)·(δ0 + Σ τ·Φ(−(T−s))/Φ(−T)),

adaptively too, since escapes add up. The ratio grows with T, so any T at or above the table's own will do.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from scipy.special import log_ndtr

from asfl_privacy.accounting.checks import SMALLEST_DELTA

TABLE_REACH = 38.0
"""T: standard deviations that a table of Gaussian noise reaches at most, wherever an event has a tail probability."""

_UP, _DOWN = 1.0 + 2.0**-50, 1.0 - 2.0**-50
_SLACK = 1.0 + 2.0**-20
_STEPS = 64


def escape_probability(tail: float, *, multiplier: Fraction) -> float:
    """τ' of one Gaussian release for neighbours whose shift is 1/multiplier standard deviations, rounded up.

    Args:
        tail: τ ≥ 0 of the release.
        multiplier: z > 0 at the distance of the two neighbours.

    Returns:
        min(1, τ·Φ(−(T−s))/Φ(−T)) with s = 1/z.

    Example:
        >>> escape_probability(1e-300, multiplier=Fraction(1, 8)) < 1e-180
        True
        >>> escape_probability(1e-300, multiplier=Fraction(1, 40))
        1.0
    """
    if tail == 0.0:
        return 0.0
    shift = math.nextafter(float(1 / multiplier), math.inf)
    if shift >= TABLE_REACH:
        return 1.0
    grown = math.log(tail) + float(log_ndtr(-(TABLE_REACH - shift))) - float(log_ndtr(-TABLE_REACH))
    return min(1.0, _exp(grown) * (1.0 + 1e-6))  # the logarithms are below 1,500 and right to 1e-12 of themselves


def charged_epsilon(
    ideal: Callable[[float], float], *, delta: float, excess: float, tail: float, escape: float = 1.0
) -> float:
    """ε of the drawn noise at ``delta``.

    Args:
        ideal: δ0 → an upper bound of the ideal ε at δ0, not increasing; only asked at δ0 ≤ ``delta``.
        delta: δ in [0, 1), > 0 where ``tail`` is.
        excess: E ≥ 0.
        tail: τ ≥ 0.
        escape: Σ τ·Φ(−(T−s))/Φ(−T), see ``escape_probability``; 1 where it is not known.

    Returns:
        ε0 + E for an ε0 with e^(E/2)·(δ0(ε0) + min(e^ε0·τ, escape)) ≤ δ, within rounding of the least such; inf where none
        is found.

    Guarantee:
        The drawn releases are (ε, δ)-private for the ε returned: δ0 = δ·e^(−E/2) − r, and e^ε0·τ ≤ r is checked for the
        r and ε0 that are returned.

    Edge cases:
        E = τ = 0: ``ideal(delta)`` itself. e^ε0·τ > δ for every ε0: inf.

    Example:
        >>> charged_epsilon(lambda delta: 1.0, delta=0.0, excess=0.5, tail=0.0) >= 1.5
        True
    """
    if excess == 0.0 and tail == 0.0:
        return ideal(delta)
    budget = delta * math.exp(-excess / 2.0) * _DOWN
    if delta > 0.0 and budget < SMALLEST_DELTA:
        return math.inf
    if tail == 0.0:
        return _added(ideal(budget), excess)
    left = (budget - escape * _UP) * _DOWN
    escaping = _added(ideal(left), excess) if escape < budget and left >= SMALLEST_DELTA else math.inf
    return min(escaping, _charged_by_ratio(ideal, budget=budget, excess=excess, tail=tail))


def _charged_by_ratio(ideal: Callable[[float], float], *, budget: float, excess: float, tail: float) -> float:
    """The charge with e^ε0·τ, whatever the sampler."""
    epsilon, reserved = 0.0, 0.0
    for step in range(_STEPS):
        left = (budget - reserved) * _DOWN
        if left < SMALLEST_DELTA:
            return math.inf
        epsilon = ideal(left)
        due = _exp(epsilon) * tail * _UP
        if step > 0 and due <= reserved:
            return _added(epsilon, excess)
        reserved = due * _SLACK  # grows from step to step: less δ is left, so ε is larger
    return math.inf


def discounted_epsilon(ideal: Callable[[float], float], *, delta: float, excess: float, tail: float) -> float:
    """A lower bound of the ε of the drawn noise at ``delta``.

    Args:
        ideal: δ0 → a lower bound of the ideal ε at δ0.
        delta: δ in [0, 1).
        excess: E ≥ 0.
        tail: τ ≥ 0.

    Returns:
        max(0, ideal(e^(E/2)·δ + τ) − E): the argument at the top of the file with ideal and drawn exchanged, where
        P(S) ≤ e^(E/2)·P̃(S) + τ and Q̃(S) ≤ e^(E/2)·Q(S).

    Example:
        >>> discounted_epsilon(lambda delta: 1.0, delta=1e-5, excess=0.25, tail=0.0) <= 0.75
        True
    """
    if excess == 0.0 and tail == 0.0:
        return ideal(delta)
    raised = (_exp(excess / 2.0) * delta + tail) * _UP
    if raised >= 1.0:
        return 0.0
    if 0.0 < raised < SMALLEST_DELTA:
        raised = SMALLEST_DELTA
    return max(0.0, (ideal(raised) - excess) - 2.0**-50 * (excess + 1.0))


def _added(epsilon: float, excess: float) -> float:
    return math.nextafter(epsilon + excess, math.inf)


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
