"""p-values and confidence bounds: exact or conservative for every sample size, never asymptotic.

Legend: u = residual / scale, so an honest layer has u ~ N(0, 1) or Laplace(0, 1); z = normal score of u, exactly N(0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special, stats


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The worst of a group of tests.

    Args:
        where: which test of the group it was, in words.
        observed: the statistic as measured.
        expected: what the claim says of it.
        p_value: Bonferroni-corrected within the group; NaN counts as a breach.
        num_tests: tests in the group.
        meaning: what the statistic is, in words.
    """

    where: str
    observed: float
    expected: float
    p_value: float
    num_tests: int
    meaning: str


def magnitude(u: np.ndarray, *, rounding: float, family: str) -> np.ndarray:
    """The sufficient statistic of the scale, u² (Gaussian) or |u| (Laplace), at the far end of the rounding of u."""
    size = np.abs(u) + rounding
    return np.asarray(size * size if family == "gaussian" else size)


def too_small(total: np.ndarray, *, count: int, family: str) -> np.ndarray:
    """P(an honest layer's total magnitude ≤ the observed one).

    Args:
        total: sums of ``count`` magnitudes.
        count: residuals in each sum.
        family: "gaussian" or "laplace".

    Source:
        Σu² of n normals is χ²_n, that is Gamma(n/2, 2); Σ|u| of n Laplace(0, 1) is Gamma(n, 1).
    """
    if family == "gaussian":
        return np.asarray(special.gammainc(count / 2.0, np.asarray(total) / 2.0))
    return np.asarray(special.gammainc(float(count), np.asarray(total)))


def relative_scale(total: np.ndarray, *, count: int, family: str) -> np.ndarray:
    """The estimate of scale over claimed scale from a sum of ``count`` magnitudes."""
    mean = np.asarray(total) / count
    return np.asarray(np.sqrt(mean) if family == "gaussian" else mean)


def normal_scores(u: np.ndarray, *, family: str) -> np.ndarray:
    """Normal scores Φ⁻¹(F(u)), accurate in both tails."""
    if family == "gaussian":
        return u
    upper_tail = -np.abs(u) - np.log(2.0)  # log P(U > |u|)
    return np.asarray(np.sign(u) * -special.ndtri_exp(upper_tail))


def too_aligned(cosine: np.ndarray, *, count: int) -> np.ndarray:
    """P(|cosine| of two independent directions in ``count`` dimensions, one of them uniform, ≥ the observed one).

    Guarantee:
        Exact if one of the vectors is N(0, I) and the other is independent of it, whatever its law.

    Source:
        cos² ~ Beta(1/2, (n − 1)/2).
    """
    if count < 2:
        return np.ones_like(np.asarray(cosine))
    square = np.minimum(np.square(cosine), 1.0)
    return np.asarray(special.betainc((count - 1) / 2.0, 0.5, 1.0 - square))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine between vectors along the last axis; 0 where one is zero, which the scale test sees."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = np.asarray((a * b).sum(axis=-1))
    with np.errstate(invalid="ignore"):  # inf/inf is NaN, and NaN is a breach
        return np.where(norms == 0, 0.0, products / np.where(norms == 0, 1.0, norms))


def distribution(u: np.ndarray, *, family: str) -> np.ndarray:
    """F(u)."""
    if family == "gaussian":
        return np.asarray(special.ndtr(u))
    tail = 0.5 * np.exp(-np.abs(u))
    return np.asarray(np.where(u < 0, tail, 1.0 - tail))


def kolmogorov_smirnov(u: np.ndarray, *, family: str) -> tuple[float, float]:
    """Largest gap between the empirical and the claimed distribution function, and an upper bound of its p-value.

    Source:
        Massart (1990): P(D ≥ x) ≤ 2·exp(−2nx²) for every n.
    """
    quantiles = distribution(np.sort(u, axis=None), family=family)
    count = quantiles.size
    steps = np.arange(count + 1) / count
    gap = float(max(np.max(steps[1:] - quantiles), np.max(quantiles - steps[:-1])))
    return gap, min(1.0, 2.0 * float(np.exp(-2.0 * count * gap * gap)))


def tail_count(u: np.ndarray, *, probability: float, family: str) -> tuple[int, float]:
    """Residuals beyond the quantile that ``probability`` of the claimed law exceeds, and the two-sided exact p-value."""
    # F is continuous, so |U| > q has this very probability at any float q, up to the rounding of q
    quantile = -special.ndtri(probability / 2.0) if family == "gaussian" else -np.log(probability)
    beyond = int(np.count_nonzero(np.abs(u) > quantile))
    below, above = (
        stats.binom.cdf(beyond, u.size, probability),
        stats.binom.sf(beyond - 1, u.size, probability),
    )
    return beyond, min(1.0, 2.0 * float(min(below, above)))


def rate_up(count: np.ndarray, *, trials: int, alpha: float) -> np.ndarray:
    """Upper confidence bound of a probability (Clopper & Pearson 1934): exceeded with probability at most ``alpha``."""
    count = np.asarray(count, dtype=np.float64)
    open_end = count >= trials
    # beta.isf keeps its digits for a tiny alpha, where ppf(1 − alpha) would round to the end
    bound = special.betainccinv(count + 1.0, np.where(open_end, 1.0, trials - count), alpha)
    return np.where(open_end, 1.0, bound)
