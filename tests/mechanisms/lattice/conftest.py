"""Oracles of the lattice tests: a source that plays given words, exact distributions, and chi-square."""

from collections import deque
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
from scipy import stats


class ScriptedSource:
    """Plays back given words, then fails."""

    is_reproducible = True

    def __init__(self, words):
        self.left = deque(int(word) for word in words)

    def words(self, count, /):
        assert len(self.left) >= count, "more words were drawn than expected"
        return np.array([self.left.popleft() for _ in range(count)], dtype=np.uint64)


def normal_mass(low, high, s):
    """P(low < N(0, s²) < high) for 0 ≤ low < high; neighbouring ends lose at most 45 of 400 bits."""
    with mpmath.workprec(400):
        return (twice_upper_tail(Fraction(low) / Fraction(s)) - twice_upper_tail(Fraction(high) / Fraction(s))) / 2


@cache
def twice_upper_tail(deviations):
    """2·(1 − Φ(x)), by the complementary error function."""
    with mpmath.workprec(400):
        return mpmath.erfc(mpmath.mpf(deviations.numerator) / deviations.denominator / mpmath.sqrt(2))


def chi_square_p(counts, probabilities, *, least=20.0):
    """p-value of counts under probabilities; neighbouring cells are pooled until each expects ``least``."""
    total = counts.sum()
    pooled_counts, pooled_expected, have, due = [], [], 0.0, 0.0
    for count, expected in zip(counts, np.asarray(probabilities) * total, strict=True):
        have, due = have + count, due + expected
        if due >= least:
            pooled_counts.append(have)
            pooled_expected.append(due)
            have, due = 0.0, 0.0
    pooled_counts[-1] += have
    pooled_expected[-1] += due
    expected = np.array(pooled_expected)
    statistic = float(((np.array(pooled_counts) - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


@pytest.fixture(scope="session")
def scripted():
    return ScriptedSource


@pytest.fixture(scope="session")
def normal_mass_between():
    return normal_mass


@pytest.fixture(scope="session")
def chi_square():
    return chi_square_p
