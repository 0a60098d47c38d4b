"""The few records that can be the worst: those that no other record exceeds in everything.

A release of a family (Laplace; k-ary randomised response) is dominated by a stronger one of the same family, at every ε
of the hockey-stick divergence, and domination is kept under composition (Zhu, Dong & Wang 2022, Theorem 10). So record A
dominates record B if its Gaussian μ² is at least B's and, in every family and for every strength s, A has at least as
many releases of strength s or more.
"""

from dataclasses import dataclass

import numpy as np

from asfl_privacy.accounting.rationals import fraction_down
from asfl_privacy.accounting.totals import Floats, Ints, PureClass

_MOST = 24
_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A record, or what dominates several.

    Args:
        square: an upper bound of its Gaussian μ².
        counts: its releases in each pure class.
        is_real: whether a record with exactly these releases exists.
    """

    square: float
    counts: tuple[int, ...]
    is_real: bool


def worst_candidates(
    squares: Floats, counts: Ints, *, classes: tuple[PureClass, ...], most: int = _MOST
) -> list[Candidate]:
    """Candidates that together dominate every record, roughly the worst first.

    Args:
        squares: μ² of every record, shape (n,).
        counts: releases in each class, shape (n, classes).
        classes: by family, strongest first within each.
        most: how many real records at most; up to four dominating ones stand for all others.

    Returns:
        At least one candidate where n ≥ 1; the first is a real record.

    Guarantee:
        Every record is dominated by a candidate.

    Example:
        >>> from fractions import Fraction
        >>> weak = PureClass(mechanism="laplace", num_classes=None, strongest=Fraction(9), weakest=Fraction(9))
        >>> found = worst_candidates(np.array([1.0, 4.0, 2.0]), np.array([[5], [3], [4]]), classes=(weak,))
        >>> [(candidate.square, candidate.counts) for candidate in found]
        [(4.0, (3,)), (2.0, (4,)), (1.0, (5,))]
        >>> [candidate.counts for candidate in worst_candidates(np.zeros(2), np.array([[5], [3]]), classes=(weak,))]
        [(5,)]
    """
    reach = _cumulative(counts, classes=classes)
    score = squares / 2.0 + counts @ np.array([_weight(pure) for pure in classes])
    score = np.nan_to_num(score, posinf=np.finfo(np.float64).max)
    found: list[Candidate] = []
    while len(score) and len(found) < most:
        first = int(np.argmax(score))
        # equal scores: a record that dominates the one picked would only be a second candidate
        square, row = squares[first], reach[first]
        found.append(_candidate(float(square), row, classes=classes, is_real=True))
        kept = (squares > square) | (reach > row).any(axis=1)
        squares, reach, score = squares[kept], reach[kept], score[kept]
    if len(score):
        for group in np.array_split(np.argsort(-score), min(_GROUPS, len(score))):
            largest = reach[group].max(axis=0)
            found.append(_candidate(float(squares[group].max()), largest, classes=classes, is_real=False))
    return found


def _candidate(square: float, row: Ints, *, classes: tuple[PureClass, ...], is_real: bool) -> Candidate:
    counts = [
        int(row[place] - (row[place - 1] if place and _family(classes[place - 1]) == _family(pure) else 0))
        for place, pure in enumerate(classes)
    ]
    return Candidate(square=square, counts=tuple(counts), is_real=is_real)


def _cumulative(counts: Ints, *, classes: tuple[PureClass, ...]) -> Ints:
    """Releases of this strength or more, within each family."""
    reach = counts.copy()
    for place in range(1, len(classes)):
        if _family(classes[place - 1]) == _family(classes[place]):
            reach[:, place] += reach[:, place - 1]
    return reach


def _family(pure: PureClass) -> tuple[str, int | None]:
    return pure.mechanism, pure.num_classes


def _weight(pure: PureClass) -> float:
    """Roughly the mean privacy loss of a release, so that the worst record scores high; only the order depends on it."""
    epsilon = min(fraction_down(1 / pure.strongest), 1e6)
    return epsilon * float(np.tanh(epsilon / 2.0))
