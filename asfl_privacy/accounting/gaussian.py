"""The Gaussian mechanism: exact (ε, δ), its inverse, and calibration for T releases.

Legend: z = noise_multiplier = σ/Δ; μ = 1/z, for many releases μ² = Σ 1/z²; u = ε/μ − μ/2;
φ, Φ = density and distribution function of N(0, 1); M(t) = Φ(−t)/φ(t), the Mills ratio.

Source: Balle & Wang (2018), Theorem 8: δ(ε) = Φ(−u) − e^ε Φ(−u − μ). Because e^ε φ(u + μ) = φ(u), this is
δ = φ(u)·(M(u) − M(u + μ)) = φ(u)·∫ (1 − t·M(t)) dt over [u, u + μ], which keeps its digits where the difference of the
two probabilities (log_ndtr included) loses up to seven of them. Composition: Dong, Roth & Su (2022), Corollary 3.3.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy.special import erfcx, ndtr

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.checks import check_delta, check_epsilon, check_multiplier, check_num_releases
from asfl_privacy.accounting.rationals import sqrt_bounds

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2.0)
_ULP = 2.0**-52
_NUDGE = 1.0 + 2.0**-51


def gaussian_delta(epsilon: float, *, noise_multiplier: float) -> float:
    """δ of one Gaussian release at ``epsilon``.

    Args:
        epsilon: ε ≥ 0.
        noise_multiplier: z = σ/Δ > 0, with Δ the ℓ2 sensitivity.

    Returns:
        δ in (0, 1].

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        Never below the exact δ of ideal arithmetic; relative excess at most 1e-12 for ε in 1e-3…100 and δ in
        1e-12…1e-2, more outside (2.3e-10 at ε=3.5e7, δ=4e-175). Where δ underflows (below 1e-290) it is an upper bound,
        never 0.

    Source:
        Balle & Wang (2018), Theorem 8.

    Example:
        >>> f"{gaussian_delta(1.0, noise_multiplier=3.7306):.3e}"
        '1.000e-05'
    """
    mu = math.nextafter(1.0 / check_multiplier(noise_multiplier), math.inf)
    upper = log_delta_bounds(check_epsilon(epsilon), mu)[1] if math.isfinite(mu) else 0.0
    return min(1.0, math.nextafter(math.exp(upper) * (1.0 + 4 * _ULP), math.inf))


def gaussian_epsilon(delta: float, *, noise_multiplier: float) -> float:
    """ε of one Gaussian release at ``delta``, rounded up.

    Args:
        delta: δ in (0, 1).
        noise_multiplier: z = σ/Δ > 0.

    Returns:
        ε ≥ 0; exactly 0 where δ alone covers the release.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        Never below the exact ε of ideal arithmetic and never negative.

    Source:
        Balle & Wang (2018), Theorem 8, inverted by bisection.

    Example:
        >>> round(gaussian_epsilon(1e-5, noise_multiplier=10.0), 3)
        0.341
        >>> gaussian_epsilon(0.9, noise_multiplier=1.0)
        0.0
    """
    z = Fraction(check_multiplier(noise_multiplier))
    return composed_gaussian_epsilon(1 / z**2, delta=delta).high


def composed_gaussian_epsilon(mu_squared: Fraction, *, delta: float) -> EpsilonBracket:
    """ε of any number of Gaussian releases from their exact μ² = Σ 1/z².

    Args:
        mu_squared: the exact sum of 1/z² over all releases, ≥ 0.
        delta: δ in (0, 1).

    Returns:
        The bracket; its width is rounding alone.

    Raises:
        ValueError: if δ is out of range or μ² is negative.

    Guarantee:
        low ≤ ε ≤ high for every order, adaptivity and mix of Gaussian releases with this μ².

    Source:
        Dong, Roth & Su (2022), Corollary 3.3: composed Gaussians are one Gaussian with μ² = Σ μ_t².

    Example:
        >>> round(composed_gaussian_epsilon(Fraction(100), delta=1e-5).high, 2)
        91.82
    """
    delta = check_delta(delta)
    if mu_squared < 0:
        raise ValueError(f"mu_squared is {float(mu_squared)!r}: a sum of squares is ≥ 0; pass the sum of 1/z²")
    if mu_squared == 0:
        return EpsilonBracket(low=0.0, high=0.0, delta=delta)
    mu_low, mu_high = sqrt_bounds(mu_squared)
    if not math.isfinite(mu_high):
        return EpsilonBracket(low=0.0, high=math.inf, delta=delta)
    target_low, target_high = _outward(math.log(delta))
    high = _bisect_up(lambda epsilon: log_delta_bounds(epsilon, mu_high)[1] <= target_low)
    low = _bisect_up(lambda epsilon: log_delta_bounds(epsilon, mu_low)[0] <= target_high) if mu_low > 0.0 else 0.0
    return EpsilonBracket(low=min(low * (1.0 - 4 * _ULP), high), high=high, delta=delta)


def gaussian_noise_multiplier(epsilon: float, *, delta: float, num_releases: float = 1) -> float:
    """The least noise multiplier z = σ/Δ with which ``num_releases`` Gaussian releases are (ε, δ)-private together.

    Args:
        epsilon: ε ≥ 0 for all releases together; 0 is finite because δ > 0.
        delta: δ in (0, 1) for all releases together.
        num_releases: T ≥ 1; a fraction rounds up.

    Returns:
        z, the safe (upper) end of the bisection.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range.

    Guarantee:
        ``composed_gaussian_epsilon(T/z²)`` never exceeds ``epsilon``; z exceeds the exact value by a factor of at most
        1 + 1e-12 for ε in 1e-3…100 and δ in 1e-12…1e-2.

    Source:
        Balle & Wang (2018), Theorem 9 (calibration), with the composition of Dong, Roth & Su (2022).

    Example:
        >>> round(gaussian_noise_multiplier(1.0, delta=1e-5), 4)
        3.7306
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    num_releases = check_num_releases(num_releases)
    target = _outward(math.log(delta))[0]

    def holds(mu: float) -> bool:
        return log_delta_bounds(epsilon, mu)[1] <= target

    fits = 1.0
    while not holds(fits):
        fits /= 2.0
    fails = 2.0 * fits
    while holds(fails):
        fits, fails = fails, 2.0 * fails
    while fits < (middle := 0.5 * (fits + fails)) < fails:
        fits, fails = (middle, fails) if holds(middle) else (fits, middle)
    z = math.sqrt(num_releases) / fits
    while composed_gaussian_epsilon(num_releases / Fraction(z) ** 2, delta=delta).high > epsilon:
        z *= _NUDGE
    return z


def classic_noise_multiplier(epsilon: float, *, delta: float) -> float:
    """The classic z = √(2 ln(1.25/δ))/ε that PixelDP uses, kept for comparison with the paper.

    Args:
        epsilon: 0 < ε < 1 for one release.
        delta: δ in (0, 1) for one release.

    Returns:
        z = σ/Δ, rounded up.

    Raises:
        ValueError: from ε = 1 on, where the formula is not proven (at ε=16, δ=1e-5 the true δ is 3.4e-4), and where the
            exact ε would exceed the asked one.

    Guarantee:
        The exact ε at ``delta`` never exceeds ``epsilon``.

    Source:
        Dwork & Roth (2014), Theorem A.1; Lecuyer et al. (2019), §2.

    Example:
        >>> round(classic_noise_multiplier(0.1, delta=1e-5), 3)
        48.448
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    if not 0.0 < epsilon < 1.0:
        raise ValueError(
            f"epsilon is {epsilon!r}: the classic Gaussian formula is proven for 0 < epsilon < 1 only and under-noises "
            'large epsilon; use method="analytic"'
        )
    z = math.nextafter(math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon * (1.0 + 4 * _ULP), math.inf)
    if gaussian_epsilon(delta, noise_multiplier=z) > epsilon:
        raise ValueError(
            f"delta is {delta!r}: at epsilon {epsilon!r} the classic Gaussian formula spends more than asked; "
            'use method="analytic"'
        )
    return z


def log_delta_bounds(epsilon: float, mu: float) -> tuple[float, float]:
    """Lower and upper bounds of log δ(ε); they differ by rounding alone unless δ underflows."""
    ratio = epsilon / mu
    u = ratio - mu / 2.0
    if u > 37.0:  # δ ≤ Φ(−u) ≤ e^(−u²/2)/2, far below every δ accepted here
        return -math.inf, -u * u / 2.0 * (1.0 - 8 * _ULP) - math.log(2.0)
    if mu < 0.5:
        t = u + mu * (_NODES + 1.0) / 2.0
        integral = mu / 2.0 * float(_WEIGHTS @ (1.0 - t * _mills(t)))
        condition = 4.0 * ((abs(u) + mu) ** 2 + 2.0)
        log_delta = math.log(integral) - u * u / 2.0 - _LOG_SQRT_2PI
    elif u > 0.0:
        first, second = float(_mills(u)), float(_mills(u + mu))
        condition = 4.0 * first / (first - second)
        log_delta = math.log(first - second) - u * u / 2.0 - _LOG_SQRT_2PI
    else:
        second = math.exp(-u * u / 2.0 - _LOG_SQRT_2PI) * float(_mills(u + mu))
        condition = 4.0 * (1.0 + u * u)
        log_delta = math.log(float(ndtr(-u)) - second)
    # rounding of u, of u², of the special functions, and the cancellation named by `condition`
    error = 2.0 * _ULP * (condition + (abs(u) + 3.0) * (ratio + mu + 1.0) + u * u + abs(log_delta) + 8.0)
    return log_delta - error, log_delta + error


def _mills(t: np.ndarray | float) -> np.ndarray:
    return np.asarray(_SQRT_HALF_PI * erfcx(np.asarray(t) / math.sqrt(2.0)))


def _bisect_up(holds: Callable[[float], bool]) -> float:
    """The least ε ≥ 0 that holds, from above; ``holds`` is false, then true, as ε grows. inf if it never holds."""
    if holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2.0 * high
        if math.isinf(high):
            return math.inf
    while high - low > _ULP * high and low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _outward(value: float) -> tuple[float, float]:
    return math.nextafter(value, -math.inf), math.nextafter(value, math.inf)
