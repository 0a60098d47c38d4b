"""Calibration: the noise multiplier for an asked ε, and the ε that it really spends."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from asfl_privacy.accounting.checks import check_choice, check_delta, check_epsilon, check_num_releases
from asfl_privacy.accounting.columns import Column
from asfl_privacy.accounting.event import make_event
from asfl_privacy.accounting.gaussian import (
    classic_noise_multiplier,
    composed_gaussian_epsilon,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from asfl_privacy.accounting.laplace import laplace_epsilon, laplace_noise_multiplier, laplace_total_epsilon
from asfl_privacy.accounting.spending import spent_epsilon
from asfl_privacy.accounting.totals import tally_releases

METHODS = ("analytic", "classic")
WASTE = 1e-3  # a calibration by search spends at least 1 − WASTE of what was asked
_SEARCH_STEPS = 100
_LARGEST_FACTOR = 2.0**40


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was calibrated.

    Args:
        mechanism: "gaussian" or "laplace".
        method: "analytic" or "classic" (Gaussian); "basic" (Laplace: sums of ε) or, for several Laplace releases at
            δ > 0, "pld" (privacy-loss distribution).
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
        delta: δ in (0, 1) for Gaussian, [0, 1) for Laplace. Compare with a ledger asked at the same δ.
        epsilon: ε > 0 of ONE release, or
        total_epsilon: ε > 0 of all releases together; pass exactly one of the two.
        num_releases: T ≥ 1; a fraction rounds up.
        method: "analytic", or "classic" for the Gaussian formula of PixelDP, which splits a total evenly over releases.

    Returns:
        The calibration, with both ε recomputed.

    Raises:
        ValueError: if an argument is NaN, infinite or out of range, or classic is asked at ε ≥ 1 per release.

    Guarantee:
        The recomputed figure never exceeds the asked one, and neither is below the exact ε of ideal arithmetic. By "pld"
        at least .999 of the asked total is used.

    Source:
        gaussian_noise_multiplier, classic_noise_multiplier, laplace_noise_multiplier; pld.py.

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
        if delta > 0.0 and num_releases > 1:
            method = "pld"
            if total_epsilon is not None:
                z *= least_factor(lambda factor: _laplace_spent(factor * z, num_releases, delta), target=asked)
                release = laplace_epsilon(delta, noise_multiplier=z)
            total = _laplace_spent(z, num_releases, delta)
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


def least_factor(spends: Callable[[float], float], *, target: float) -> float:
    """A factor on noise multipliers that spends at most ``target``, and little less.

    Args:
        spends: factor → ε, falling as the factor grows up to small errors.
        target: ε > 0.

    Returns:
        A factor f with ``spends(f)`` ≤ ``target``, checked for this very f; ≥ (1 − WASTE)·target where ``spends`` allows.

    Raises:
        ValueError: if no factor up to 2**40 is enough.

    Example:
        >>> factor = least_factor(lambda factor: 3.0 / factor, target=2.0)
        >>> 1.5 <= factor <= 1.502
        True
    """
    factor = 1.0 + 2.0**-40  # where the start was right up to rounding, one look is enough
    value = spends(factor)
    below, above = (math.nan, math.nan), (math.nan, math.nan)  # the largest that fails, the least that fits: factor, ε
    for step in range(_SEARCH_STEPS):
        if value <= target:
            above = (factor, value)
            if value >= (1.0 - WASTE) * target:
                break
        else:
            below = (factor, value)
        if math.isnan(above[0]):
            if factor > _LARGEST_FACTOR:
                raise ValueError(
                    f"total_epsilon is {target!r}: what does not depend on the noise leaves nothing of it, however large "
                    "the noise; ask for a larger total, or reduce the fixed part"
                )
            factor *= 2.0
        elif math.isnan(below[0]):
            if factor < 1.0 / _LARGEST_FACTOR:
                break
            factor /= 2.0
        else:
            if above[0] <= below[0] * (1.0 + 2.0**-40):
                break
            factor = _between(below, above, aim=(1.0 - WASTE / 2.0) * target, halve=step % 3 == 2)
        value = spends(factor)
    return above[0]


def _between(below: tuple[float, float], above: tuple[float, float], *, aim: float, halve: bool) -> float:
    """Where a power law through both ends meets ``aim``, or the geometric middle."""
    share = 0.5
    if not halve and math.isfinite(below[1]) and above[1] > 0.0:
        share = math.log(below[1] / aim) / math.log(below[1] / above[1])
    return float(below[0] * (above[0] / below[0]) ** min(0.98, max(0.02, share)))


def _laplace_spent(noise_multiplier: float, num_releases: int, delta: float) -> float:
    event = make_event(
        channel="activations",
        mechanism="laplace",
        noise_multiplier=noise_multiplier,
        round_number=0,
        whole_record_multiplier=None,
        radius="any",
    )
    column = Column(start=0, length=1, ids=None, counts=None, every=num_releases)
    tally = tally_releases({event: [column]}, distance=1.0)
    assert tally is not None
    return spent_epsilon(tally, delta=delta).high
