"""Observed sampling: what one recipient learns of a record that it receives in some rounds and not in others.

Legend: T rounds, q = sampling probability, K ~ Binomial(T, q) releases received, z = noise multiplier,
δ_k(ε) = δ of a Gaussian with μ = √k/z, that of k releases. The recipient sees in which rounds it received the record,
so K is known to it, and δ(ε) = Σ_k P(K = k)·δ_k(ε): the average of the δ, never the δ of a mixture of outputs.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import check_delta, check_integer, check_multiplier, check_real
from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon, log_delta_bounds
from asfl_privacy.accounting.losses import Floats
from asfl_privacy.accounting.rationals import sqrt_bounds

_ULP = 2.0**-52
_MOST_ROUNDS = 10**9
_MOST_BINS = 256
_TAIL = 40.0  # the counts left out weigh e^{−40}·δ on either side


def sampled_epsilon(
    noise_multiplier: float | Fraction, *, num_rounds: int, sampling_probability: float, delta: float
) -> EpsilonBracket:
    """ε of one record towards one recipient that receives it with probability q in each round, and sees when.

    Only for recipients that do not collude: together they hold all releases, and the total is that of all rounds.
    It needs a declared sampler that decides independently in each round, with this q, without looking at the record.
    It is no amplification by Poisson sampling: that needs the sample to be hidden, and here the recipient sees it.

    Args:
        noise_multiplier: z = σ/Δ > 0 of one release, Gaussian.
        num_rounds: T, 1 to 10^9.
        sampling_probability: q in [0, 1].
        delta: δ in (0, 1).

    Returns:
        The bracket; its width is rounding alone where fewer than 256 counts matter, and ≤ .2 % in ε otherwise.

    Raises:
        ValueError: if an argument is NaN or out of range.

    Guarantee:
        low ≤ ε ≤ high for the exact mixture in ideal arithmetic, rounding and left-out counts included.

    Edge cases:
        q = 1 is every release counted, in closed form; q = 0 releases nothing.

    Source:
        The recipient's view is (K, outputs), and K does not depend on the record: the hockey-stick divergence is the
        mean over K. Each δ_k: Balle & Wang (2018), Theorem 8. Left-out counts: Chernoff's bound for binomial tails.

    Example:
        >>> bracket = sampled_epsilon(10.0, num_rounds=100, sampling_probability=0.1, delta=1e-5)
        >>> round(bracket.low, 3), round(bracket.high, 3)
        (1.352, 1.352)
    """
    check_multiplier(noise_multiplier)
    z, delta = Fraction(noise_multiplier), check_delta(delta)
    rounds = check_integer("num_rounds", num_rounds, minimum=1)
    if rounds > _MOST_ROUNDS:
        raise ValueError(
            f"num_rounds is {rounds}: at most {_MOST_ROUNDS} are counted; pass fewer, or use the closed form"
        )
    q = check_real("sampling_probability", sampling_probability, minimum=0.0, exclusive=False, fix="pass e.g. .1")
    if q > 1.0:
        raise ValueError(f"sampling_probability is {q!r}: a probability is at most 1; pass e.g. .1")
    if q == 1.0:
        return composed_gaussian_epsilon(rounds / z**2, delta=delta)
    if q == 0.0:
        return EpsilonBracket(low=0.0, high=0.0, delta=delta)

    first, last = _window(rounds, q, _TAIL - math.log(delta))
    edges = np.unique(np.linspace(first, last + 1, min(_MOST_BINS, last + 1 - first) + 1).astype(np.int64))
    logs, error = _log_probability(rounds, q, np.arange(first, last + 1, dtype=np.float64))
    log_mass = np.logaddexp.reduceat(logs, edges[:-1] - first)
    least = [sqrt_bounds(int(k) / z**2)[0] for k in edges[:-1]]  # fewest releases in each bin
    most = [sqrt_bounds((int(k) - 1) / z**2)[1] for k in edges[1:]]
    if not math.isfinite(most[-1]):
        return EpsilonBracket(low=0.0, high=math.inf, delta=delta)
    log_delta = math.log(delta)

    def excess_upper(epsilon: float) -> float:
        parts = [log_delta_bounds(epsilon, mu)[1] for mu in most]
        total = float(np.logaddexp.reduce(log_mass + np.minimum(parts, 0.0))) + error
        return float(np.logaddexp(total, math.log(2.0) - _TAIL + log_delta)) - log_delta * (1.0 + 4 * _ULP)

    def excess_lower(epsilon: float) -> float:
        parts = [log_delta_bounds(epsilon, mu)[0] if mu > 0.0 else -math.inf for mu in least]
        return float(np.logaddexp.reduce(log_mass + np.array(parts))) - error - log_delta * (1.0 - 4 * _ULP)

    ceiling = composed_gaussian_epsilon(last / z**2, delta=delta).high
    if math.isinf(ceiling):
        return EpsilonBracket(low=0.0, high=math.inf, delta=delta)
    high = low = 0.0
    if excess_upper(0.0) > 0.0:
        high, step = _root(excess_upper, ceiling), 1e-12 * ceiling
        while excess_upper(high) > 0.0:
            high, step = high + step, 2.0 * step
    if excess_lower(0.0) >= 0.0:
        low, step = min(high, _root(excess_lower, ceiling)), 1e-12 * ceiling
        while low > 0.0 and excess_lower(low) < 0.0:
            low, step = max(0.0, low - step), 2.0 * step
    return EpsilonBracket(low=low, high=high, delta=delta)


def _root(excess: Callable[[float], float], ceiling: float) -> float:
    """About where a decreasing function that is ≥ 0 at 0 crosses 0; the caller steps to the safe side of it."""

    def finite(epsilon: float) -> float:
        return max(-1e6, excess(epsilon))

    while finite(ceiling) > 0.0:
        ceiling *= 2.0
    return float(brentq(finite, 0.0, ceiling, xtol=1e-13 * ceiling, rtol=1e-13, disp=False))


def _window(rounds: int, q: float, nats: float) -> tuple[int, int]:
    """First and last count ≥ 1 outside of which the probability is ≤ e^{−nats} on either side."""

    def rare(k: int) -> bool:
        """Whether P(K ≥ k) for k above the mean, or P(K ≤ k) for k below it, is ≤ e^{−T·KL(k/T, q)} ≤ e^{−nats}."""
        p = k / rounds
        above = k * math.log(p / q) if k else 0.0
        below = (rounds - k) * (math.log(1.0 - p) - math.log1p(-q)) if k < rounds else 0.0
        return above + below >= nats + 1.0 + 16 * _ULP * (abs(above) + abs(below))

    mean = rounds * q
    low, high = math.ceil(mean), rounds + 1  # the least rare count above the mean; T + 1 never happens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rare(middle) else (middle + 1, high)
    last = min(rounds, low)
    low, high = -1, math.floor(mean)  # the largest rare count below it
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rare(middle) else (low, middle - 1)
    return max(1, low), max(1, last)


def _log_probability(rounds: int, q: float, counts: Floats) -> tuple[Floats, float]:
    """Logarithms of P(K = k), and a bound on the error of any of them and of the logarithms of their sums."""
    parts = np.stack(
        [
            np.full(len(counts), gammaln(rounds + 1.0)),
            -gammaln(counts + 1.0),
            -gammaln(rounds - counts + 1.0),
            counts * math.log(q),
            (rounds - counts) * math.log1p(-q),
        ]
    )
    logs = np.sum(parts, axis=0)
    sizes = np.sum(np.abs(parts), axis=0)
    return logs, _ULP * float(64.0 * (16.0 + np.max(sizes)) + 4.0 * len(counts) * (1.0 + np.max(np.abs(logs))))
