"""The Laplace mechanism: exact (ε, δ) of one release, and calibration for T releases by basic composition.

Legend: z = noise_multiplier = b/Δ with Δ the ℓ1 sensitivity; ε0 = 1/z, the pure ε of one release.

The vector mechanism (i.i.d. Laplace on every coordinate) with ℓ1 sensitivity Δ is dominated by the scalar one with
shift Δ, so the scalar formulas hold for any dimension. They hold for continuous noise only.
"""

import math
from fractions import Fraction

from asfl_privacy.accounting.checks import (
    SMALLEST_DELTA,
    check_delta,
    check_epsilon,
    check_multiplier,
    check_num_releases,
)
from asfl_privacy.accounting.rationals import quotient_up

_ULP = 2.0**-52


def laplace_epsilon(delta: float, *, noise_multiplier: float) -> float:
    """ε of one Laplace release at ``delta``: max(0, 1/z + 2 ln(1 − δ)), rounded up.

    Args:
        delta: δ in [0, 1); 0 gives the pure ε.
        noise_multiplier: z = b/Δ > 0, with Δ the ℓ1 sensitivity.

    Returns:
        ε ≥ 0.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        Never below the exact ε of ideal arithmetic and never negative.

    Source:
        Dwork, McSherry, Nissim & Smith (2006), Theorem 1, for δ=0. For δ>0: the hockey-stick divergence of two Laplace
        densities at distance Δ is 1 − exp((ε − 1/z)/2) for 0 ≤ ε ≤ 1/z.

    Example:
        >>> laplace_epsilon(0.0, noise_multiplier=2.0)
        0.5
    """
    delta, z = check_delta(delta, zero_allowed=True), check_multiplier(noise_multiplier)
    pure = quotient_up(1, z)
    if delta == 0.0 or math.isinf(pure):
        return pure
    reduced = pure + 2.0 * math.log1p(-delta)
    return max(0.0, reduced + 4 * _ULP * (pure - 2.0 * math.log1p(-delta))) if reduced > 0.0 else 0.0


def laplace_delta(epsilon: float, *, noise_multiplier: float) -> float:
    """δ of one Laplace release at ``epsilon``: max(0, 1 − exp((ε − 1/z)/2)), rounded up.

    Args:
        epsilon: ε ≥ 0.
        noise_multiplier: z = b/Δ > 0.

    Returns:
        δ in [0, 1].

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        Never below the exact δ of ideal arithmetic.

    Example:
        >>> laplace_delta(0.5, noise_multiplier=2.0)
        0.0
        >>> round(laplace_delta(0.0, noise_multiplier=1.0), 4)
        0.3935
    """
    epsilon, z = check_epsilon(epsilon), check_multiplier(noise_multiplier)
    if Fraction(epsilon) * Fraction(z) >= 1:
        return 0.0
    pure = quotient_up(1, z)
    gap = pure - epsilon + 2 * _ULP * pure
    return min(1.0, math.nextafter(-math.expm1(-gap / 2.0) * (1.0 + 4 * _ULP), math.inf))


def laplace_noise_multiplier(epsilon: float, *, delta: float = 0.0, num_releases: float = 1) -> float:
    """The noise multiplier z = b/Δ with which ``num_releases`` Laplace releases are (ε, δ)-private together.

    Args:
        epsilon: ε for all releases together; > 0, or 0 with δ > 0.
        delta: δ in [0, 1) for all releases together, split evenly.
        num_releases: T ≥ 1; a fraction rounds up.

    Returns:
        z = 1/(ε/T − 2 ln(1 − δ/T)), rounded up.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range, or ε and δ are both 0.

    Guarantee:
        T·1/z ≤ ε exactly for δ=0; for δ>0, T·ε_release(δ/T) ≤ ε.

    Source:
        Basic composition: Dwork & Roth (2014), Theorem 3.16. One release: b = Δ/(ε − 2 ln(1 − δ)), see laplace_epsilon.

    Example:
        >>> laplace_noise_multiplier(0.5)
        2.0
        >>> laplace_noise_multiplier(8.0, num_releases=10)
        1.25
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta, zero_allowed=True)
    num_releases = check_num_releases(num_releases)
    if epsilon == 0.0 and delta == 0.0:
        raise ValueError("epsilon is 0.0: with delta=0 it would need infinite noise; pass epsilon > 0, or delta > 0")
    each = epsilon / num_releases - 2.0 * math.log1p(-delta / num_releases)
    z = 1.0 / each if each > 0.0 else math.inf
    if not math.isfinite(z):
        raise ValueError(f"epsilon is {epsilon!r}: the noise it needs overflows; pass a larger epsilon")
    while laplace_total_epsilon(z, delta=delta, num_releases=num_releases) > epsilon:
        z = math.nextafter(z, math.inf)
    return z


def laplace_total_epsilon(noise_multiplier: float, *, delta: float = 0.0, num_releases: float = 1) -> float:
    """ε of ``num_releases`` equal Laplace releases together, by basic composition with δ split evenly, rounded up.

    Args:
        noise_multiplier: z = b/Δ > 0 of each release.
        delta: δ in [0, 1) for all releases together.
        num_releases: T ≥ 1; a fraction rounds up.

    Returns:
        T·ε_release(δ/T).

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        Never below the sum it names, so a valid ε for the T releases at ``delta``.

    Example:
        >>> laplace_total_epsilon(10.0, num_releases=100)
        10.0
    """
    z, delta = check_multiplier(noise_multiplier), check_delta(delta, zero_allowed=True)
    num_releases = check_num_releases(num_releases)
    delta_each = math.nextafter(delta / num_releases, 0.0)
    if delta_each < SMALLEST_DELTA:
        return quotient_up(num_releases, z)
    each = laplace_epsilon(delta_each, noise_multiplier=z)
    return 0.0 if each == 0.0 else math.nextafter(num_releases * each, math.inf)
