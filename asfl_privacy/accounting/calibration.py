"""Calibration: the noise multiplier for an asked ε, and the ε that it really spends."""

from dataclasses import dataclass
from fractions import Fraction

from asfl_privacy.accounting.checks import check_choice, check_delta, check_epsilon, check_num_releases
from asfl_privacy.accounting.gaussian import (
    classic_noise_multiplier,
    composed_gaussian_epsilon,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from asfl_privacy.accounting.laplace import laplace_epsilon, laplace_noise_multiplier, laplace_total_epsilon

METHODS = ("analytic", "classic")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was calibrated.

    Args:
        mechanism: "gaussian" or "laplace".
        method: "analytic" or "classic" (Gaussian); "basic" (Laplace: sums of ε).
        noise_multiplier: z = σ/Δ or b/Δ, Δ in the mechanism's own norm.
        num_releases: T, rounded up.
        epsilon_release: ε of one release at ``delta``, recomputed from ``noise_multiplier``.
        epsilon_total: ε of all T releases together at ``delta``, recomputed from ``noise_multiplier``.
        delta: the δ of both figures.
    """

    mechanism: str
    method: str
    noise_multiplier: float
    num_releases: int
    epsilon_release: float
    epsilon_total: float
    delta: float


def calibrate(
    mechanism: str,
    *,
    delta: float,
    epsilon: float | None = None,
    total_epsilon: float | None = None,
    num_releases: float = 1,
    method: str = "analytic",
) -> Calibration:
    """Find the least noise multiplier for an asked ε.

    Args:
        mechanism: "gaussian" or "laplace".
        delta: δ in (0, 1) for Gaussian, [0, 1) for Laplace. A ledger states Laplace totals at δ=0, so calibrate with
            delta=0 whatever is compared with a ledger.
        epsilon: ε > 0 of ONE release, or
        total_epsilon: ε > 0 of all releases together; pass exactly one of the two.
        num_releases: T ≥ 1; a fraction rounds up.
        method: "analytic", or "classic" for the Gaussian formula of PixelDP, which splits a total evenly over releases.

    Returns:
        The calibration, with both ε recomputed.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range, or classic is asked at ε ≥ 1 per release.

    Guarantee:
        The recomputed figure never exceeds the asked one, and neither is below the exact ε of ideal arithmetic.

    Source:
        gaussian_noise_multiplier, classic_noise_multiplier, laplace_noise_multiplier.

    Example:
        >>> facts = calibrate("gaussian", total_epsilon=8.0, delta=1e-5, num_releases=1000)
        >>> round(facts.noise_multiplier, 2), facts.epsilon_total <= 8.0
        (18.98, True)
    """
    check_choice("mechanism", mechanism, ("gaussian", "laplace"))
    check_choice("method", method, METHODS)
    delta = check_delta(delta, zero_allowed=mechanism == "laplace")
    num_releases = check_num_releases(num_releases)
    if (epsilon is None) == (total_epsilon is None):
        raise ValueError(
            f"epsilon is {epsilon!r} and total_epsilon is {total_epsilon!r}: exactly one must be given; "
            "pass epsilon for one release or total_epsilon for all of them"
        )
    asked = check_epsilon(epsilon) if total_epsilon is None else check_epsilon(total_epsilon, name="total_epsilon")
    together = 1 if total_epsilon is None else num_releases
    if mechanism == "laplace":
        if method != "analytic":
            raise ValueError("method is 'classic': Laplace has one formula, b = Δ/ε; leave method=\"analytic\"")
        z = laplace_noise_multiplier(asked, delta=delta, num_releases=together)
        method = "basic"
        release = laplace_epsilon(delta, noise_multiplier=z)
        total = laplace_total_epsilon(z, delta=delta, num_releases=num_releases)
    else:
        if method == "classic":
            z = classic_noise_multiplier(asked / together, delta=delta / together)
        else:
            z = gaussian_noise_multiplier(asked, delta=delta, num_releases=together)
        release = gaussian_epsilon(delta, noise_multiplier=z)
        total = composed_gaussian_epsilon(num_releases / Fraction(z) ** 2, delta=delta).high
    return Calibration(
        mechanism=mechanism,
        method=method,
        noise_multiplier=z,
        num_releases=num_releases,
        epsilon_release=release,
        epsilon_total=total,
        delta=delta,
    )
