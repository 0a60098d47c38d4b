"""Part 5, likelihood: how well the worst pair of records can be told apart, as a lower confidence bound on ε.

The residuals r₀, r₁ of the worst pair are taken about what the claim says of x₀, x₁ without noise, which lie D apart. A
single release hardly shows a small ε, so a *group* pair is tested: r₀ against r₁ + k·D, k steps of equal length in a row.
The threshold and k are chosen on one half of the residuals; errors of both kinds are counted on the other half and
bounded above by Clopper & Pearson. What then follows for ε depends on what the residuals look like:

- Gaussian, one scale: k steps of a μ-GDP layer are kμ-GDP (Dong, Roth & Su 2022, Theorem 2.14), so
  μ ≥ (Φ⁻¹(1 − FPR) − Φ⁻¹(FNR))/k with the bounds put in, and ε follows from μ at the claimed δ.
- Laplace, one scale: k steps of an (ε, δ) layer are (kε, δ·Σ_{i<k} e^iε) (Dwork & Roth 2014, Theorem 2.2), so
  1 − FNR ≤ e^kε·FPR + δ·Σ e^iε, and the same with the roles exchanged.
- Neither: only k = 1 is tested and only 1 − FNR ≤ e^ε·FPR + δ is used, which holds for any noise.

jax-privacy's ``epsilon_from_gdp`` is not used: its bound exceeds the truth far more often than stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy import special

from asfl_privacy.accounting import composed_gaussian_epsilon
from asfl_privacy.audit.claim import Claim
from asfl_privacy.audit.family import TAILS
from asfl_privacy.audit.pair import Pair
from asfl_privacy.audit.significance import kolmogorov_smirnov, magnitude, rate_up, relative_scale, tail_count

MOST_SCALARS = 2**17
GROUP_MU = 3.0  # two Gaussians 3σ apart: where a count of errors says most about μ
GROUP_EPSILON = 2.0
NUM_THRESHOLDS = 60
_OTHER_LAW = 1e-3  # an honest layer taken for another law gets a smaller bound, never a larger one


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A lower confidence bound on ε, and the test that gave it in words."""

    epsilon: float
    where: str


def bound_epsilon(pair: Pair, *, claim: Claim, alpha: float, stream: np.random.Generator) -> list[LowerBound]:
    """Lower bounds on ε: of the whole record along D, and of single coordinates.

    Args:
        pair: residuals of the worst pair.
        claim: gives family, δ and norm.
        alpha: error probability of both bounds together.
        stream: draws which residuals choose the threshold and which test it.

    Returns:
        Two bounds; none if D is zero.

    Guarantee:
        If residuals of different rows and coordinates are independent, the noise does not depend on the input and two
        neighbours reach D, then with probability at least 1 − alpha no bound exceeds the ε of the noise at the claimed
        δ. Where the noise is not of the claimed family yet passes for it in these samples, a bound may be off by what
        they cannot show. Single coordinates take D to be reached within one of them, the worst case in ℓ1 and no
        restriction for Gaussian noise.
    """
    length = float(np.linalg.norm(pair.difference))
    if not length > 0.0:
        return []
    direction = pair.difference / length
    size = float(np.linalg.norm(pair.difference, ord=claim.norm))
    scalars = [_at_most(side.ravel(), MOST_SCALARS, stream) for side in (pair.first, pair.second)]
    projected = [pair.first @ direction, pair.second @ direction]
    # a projection of Laplace noise is another law
    families = (claim.family if claim.family == "gaussian" or pair.first.shape[1] == 1 else None, claim.family)
    return [
        _bound(
            *projected,
            step=length,
            family=families[0],
            claim=claim,
            alpha=alpha / 2.0,
            stream=stream,
            where=f"{pair.where}, whole records",
        ),
        _bound(
            *scalars,
            step=size,
            family=families[1],
            claim=claim,
            alpha=alpha / 2.0,
            stream=stream,
            where=f"{pair.where}, single coordinates",
        ),
    ]


def _bound(
    first: np.ndarray,
    second: np.ndarray,
    *,
    step: float,
    family: str | None,
    claim: Claim,
    alpha: float,
    stream: np.random.Generator,
    where: str,
) -> LowerBound:
    """The bound from scalars: first against second + k·step, thresholds chosen on one half and tested on the other."""
    family = family if family is not None and _is_of_family(first, second, family=family) else None
    level = alpha / 2.0  # shared by the two laws, since the same residuals decide between them
    (choose_0, test_0), (choose_1, test_1) = (np.array_split(stream.permutation(side), 2) for side in (first, second))
    best = (-math.inf, 1, 0.0)
    for steps in _numbers_of_steps(step, family=family):
        moved = choose_1 + steps * step
        thresholds = np.quantile(np.concatenate([choose_0, moved]), np.linspace(0.002, 0.998, NUM_THRESHOLDS))
        gains = _gain(*_error_rates(choose_0, moved, thresholds, alpha=level), steps=steps, family=family)
        place = int(np.argmax(gains))
        best = max(best, (float(gains[place]), steps, float(thresholds[place])))
    _, steps, threshold = best
    rates = _error_rates(test_0, test_1 + steps * step, np.array([threshold]), alpha=level)
    assert claim.delta is not None  # resolved by the claim
    epsilon = _epsilon(*(float(rate[0]) for rate in rates), steps=steps, family=family, delta=claim.delta)
    law = "any law" if family is None else f"{family} noise, {steps} step{'s' if steps > 1 else ''}"
    return LowerBound(epsilon=epsilon, where=f"{where}, {law}")


def _is_of_family(first: np.ndarray, second: np.ndarray, *, family: str) -> bool:
    """Whether both sides pass for noise of the family with one common scale.

    The scale is fitted, which makes the Kolmogorov–Smirnov gap smaller than against a known law: the honest pass more
    often than stated.
    """
    both = np.concatenate([first, second])
    total = magnitude(both, rounding=0.0, family=family).sum()
    scale = float(relative_scale(total, count=both.size, family=family))
    if not scale > 0.0:
        return False
    p_values = [
        *(kolmogorov_smirnov(side / scale, family=family)[1] for side in (first, second)),
        *(tail_count(both / scale, probability=tail, family=family)[1] for tail in TAILS),
    ]
    return min(p_values) > _OTHER_LAW / len(p_values)


def _numbers_of_steps(step: float, *, family: str | None) -> list[int]:
    """Numbers of steps k: 1, and those about where a group pair says most."""
    if family is None:
        return [1]
    group = (GROUP_MU if family == "gaussian" else GROUP_EPSILON) / step
    return sorted({1, *(max(1, round(group * factor)) for factor in (0.5, 1.0, 1.5))})


def _error_rates(
    null: np.ndarray, moved: np.ndarray, thresholds: np.ndarray, *, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of P(null > threshold) and P(moved ≤ threshold), both valid together at level alpha."""
    above = len(null) - np.searchsorted(np.sort(null), thresholds, side="right")
    below = np.searchsorted(np.sort(moved), thresholds, side="right")
    return (
        rate_up(above, trials=len(null), alpha=alpha / 2.0),
        rate_up(below, trials=len(moved), alpha=alpha / 2.0),
    )


def _gain(false_positive: np.ndarray, false_negative: np.ndarray, *, steps: int, family: str | None) -> np.ndarray:
    """What the threshold maximises: μ (Gaussian), or ε at δ=0."""
    if family == "gaussian":
        return np.asarray((-special.ndtri(false_positive) - special.ndtri(false_negative)) / steps)
    with np.errstate(divide="ignore"):
        gains = np.maximum(
            np.log1p(-false_negative) - np.log(false_positive), np.log1p(-false_positive) - np.log(false_negative)
        )
    return np.asarray(gains / steps)


def _epsilon(false_positive: float, false_negative: float, *, steps: int, family: str | None, delta: float) -> float:
    """The least ε ≥ 0 that the two error rates allow at δ, rounded down."""
    gain = float(_gain(np.array(false_positive), np.array(false_negative), steps=steps, family=family))
    if not gain > 0.0:
        return 0.0
    if family == "gaussian":
        mu = math.nextafter(gain * (1.0 - 1e-12), 0.0)
        return composed_gaussian_epsilon(Fraction(mu) ** 2, delta=delta).low

    def allowed(epsilon: float) -> bool:
        # Σ_{i<k} e^{iε}·δ is (e^{kε} − 1)/(e^ε − 1)·δ without its 0/0
        group_delta = delta * sum(math.exp(i * epsilon) for i in range(steps)) if delta else 0.0
        factor = math.exp(steps * epsilon)
        return (
            1.0 - false_negative <= factor * false_positive + group_delta
            and 1.0 - false_positive <= factor * false_negative + group_delta
        )

    low, high = 0.0, gain  # at δ=0 the bound is the gain itself, and δ only lowers it
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if allowed(middle) else (middle, high)
    return low * (1.0 - 1e-12)


def _at_most(values: np.ndarray, count: int, stream: np.random.Generator) -> np.ndarray:
    return values if len(values) <= count else stream.choice(values, count, replace=False, shuffle=False)
