"""Totals over records: the largest Σ n/z or Σ n/z² of one record, exact for few multipliers, outward otherwise."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.accounting.gaussian import composed_gaussian_epsilon
from asfl_privacy.accounting.rationals import fraction_up

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_EXACT_GROUPS = 8
_ULP = 2.0**-52
_TINY = Fraction(1e-290)  # below it floats lose their relative precision


@dataclass(frozen=True, kw_only=True)
class Group:
    """All releases with one multiplier.

    Args:
        multiplier: the exact noise multiplier z > 0.
        ids: record ids, shape (n,), sorted, distinct.
        counts: releases of each, shape (n,), ≥ 1.
    """

    multiplier: Fraction
    ids: Ints
    counts: Ints

    def weight(self, power: int) -> Fraction:
        """1/z to ``power``."""
        return 1 / self.multiplier**power


def merge_counts(columns: Iterable[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Add up (ids, counts) columns: sorted distinct ids and the sum of their counts.

    Example:
        >>> ids, counts = merge_counts([(np.array([1, 4]), np.array([2, 1])), (np.array([4]), np.array([5]))])
        >>> ids.tolist(), counts.tolist()
        ([1, 4], [2, 6])
    """
    listed = list(columns)
    if not listed:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    ids, inverse = np.unique(np.concatenate([ids for ids, _ in listed]), return_inverse=True)
    totals = np.zeros(len(ids), dtype=np.int64)
    np.add.at(totals, inverse, np.concatenate([counts for _, counts in listed]))
    return ids.astype(np.int64), totals


def largest_sum(groups: list[Group], *, power: int) -> tuple[Fraction, Fraction]:
    """Bounds of the largest Σ counts/z^power of any record.

    Args:
        groups: releases by multiplier.
        power: 1 for Laplace (pure ε), 2 for Gaussian (μ²).

    Returns:
        (low, high); equal, hence exact, for up to 8 distinct multipliers.

    Guarantee:
        low ≤ the exact maximum ≤ high.
    """
    if not groups:
        return Fraction(0), Fraction(0)
    ids = _all_ids(groups)
    sums = _float_sums(groups, ids, power=power)
    largest, error = float(sums.max()), _relative_error(groups)
    if not np.isfinite(largest):
        smallest = float(min(group.multiplier for group in groups))
        raise ValueError(
            f"a noise multiplier is {smallest!r}: the total of its releases overflows, so no finite epsilon exists; "
            "use more noise"
        )
    if len(groups) > _EXACT_GROUPS:
        nearest, excess = Fraction(largest), Fraction(error)
        return max(Fraction(0), nearest * (1 - excess) - _TINY), nearest * (1 + excess)
    candidates = ids[sums >= largest * (1.0 - 4.0 * error)]
    rows = np.zeros((len(candidates), len(groups)), dtype=np.int64)
    for column, group in enumerate(groups):
        _, mine, theirs = np.intersect1d(candidates, group.ids, assume_unique=True, return_indices=True)
        rows[mine, column] = group.counts[theirs]
    weights = [group.weight(power) for group in groups]
    exact = max(
        sum((int(count) * weight for count, weight in zip(row, weights, strict=True)), Fraction(0))
        for row in np.unique(rows, axis=0)
    )
    return exact, exact


def largest_mixed_epsilon(gaussian: list[Group], laplace: list[Group], *, delta: float) -> float:
    """The largest Σ ε_Laplace + ε_Gauss(δ) of any record, rounded up.

    Guarantee:
        A valid ε at δ for every record: the pure ε of its Laplace releases adds to the (ε, δ) of its Gaussian ones.
    """
    ids = _all_ids(gaussian + laplace)
    squares = _float_sums(gaussian, ids, power=2) * (1.0 + _relative_error(gaussian))
    pure = _float_sums(laplace, ids, power=1) * (1.0 + _relative_error(laplace))
    highest = 0.0
    best_pure = -1.0
    # only records that no other record exceeds in both totals can be the worst
    for index in np.lexsort((-pure, -squares)):
        if pure[index] > best_pure:
            best_pure = float(pure[index])
            from_gaussian = composed_gaussian_epsilon(Fraction(float(squares[index])), delta=delta).high
            highest = max(highest, (from_gaussian + best_pure) * (1.0 + 2 * _ULP))
    return highest


def _all_ids(groups: list[Group]) -> Ints:
    return np.unique(np.concatenate([group.ids for group in groups]))


def _float_sums(groups: list[Group], ids: Ints, *, power: int) -> Floats:
    sums = np.zeros(len(ids), dtype=np.float64)
    for group in groups:
        sums[np.searchsorted(ids, group.ids)] += group.counts * fraction_up(group.weight(power))
    return sums


def _relative_error(groups: list[Group]) -> float:
    """Bound on the relative error of a float sum of positive terms, each rounded three times before it is added."""
    return (len(groups) + 4) * _ULP
