"""Norm tables of linear operators, from the sums over their rows and columns.

Letters: W (m×n) the matrix; 1→q is the largest column q-norm, p→∞ the largest row p*-norm (p* dual); both are exact.
2→2 is the largest singular value. ∞→1, ∞→2 and 2→1 are NP-hard; the table holds entrywise bounds for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sensitivity.norms import NormTable, between_dual_bounds, lipschitz_table, tighten
from sensitivity.rounding import FloatArray, inflate, mul_up, scale_to_unit, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up


@dataclass(frozen=True, kw_only=True)
class MatrixSums:
    """Upper bounds on the entrywise quantities of a matrix W, from which its norm table follows.

    Attributes:
        num_in: columns of W.
        num_out: rows of W.
        largest_entry: max |W_ij|.
        column_l1: largest ℓ1 norm of a column.
        column_l2: largest ℓ2 norm of a column.
        row_l1: largest ℓ1 norm of a row.
        row_l2: largest ℓ2 norm of a row.
        columns_l1_l2: ℓ2 norm of the vector of the columns' ℓ1 norms.
        rows_l1_l2: ℓ2 norm of the vector of the rows' ℓ1 norms.
        total_l1: Σ |W_ij|.
    """

    num_in: int
    num_out: int
    largest_entry: float
    column_l1: float
    column_l2: float
    row_l1: float
    row_l2: float
    columns_l1_l2: float
    rows_l1_l2: float
    total_l1: float


def table_from_sums(sums: MatrixSums, *, spectral: float = math.inf) -> NormTable:
    """Norm table of a linear operator.

    Args:
        sums: its row and column sums, each rounded up.
        spectral: an upper bound on its largest singular value, or infinity.

    Returns:
        A table: exact up to rounding in 1→q and p→∞, an upper bound elsewhere.
    """
    two_two = min(spectral, between_dual_bounds(sums.column_l1, sums.row_l1))
    table = (
        (sums.column_l1, sums.column_l2, sums.largest_entry),
        (sums.columns_l1_l2, two_two, sums.row_l2),
        (sums.total_l1, sums.rows_l1_l2, sums.row_l1),
    )
    return tighten(table, num_in=sums.num_in, num_out=sums.num_out)


def matrix_sums(W: FloatArray) -> MatrixSums:
    """Row and column sums of a dense matrix.

    Args:
        W: float64, shape (m, n), m outputs and n inputs.

    Returns:
        The sums, rounded up.

    Raises:
        ValueError: if W is empty or holds NaN or infinity.
    """
    if W.ndim != 2 or W.size == 0:
        raise ValueError(f"a matrix of shape {W.shape} has no operator norm: it must be 2-D and not empty; reshape it")
    scaled, scale = scale_to_unit(W)
    A = np.abs(scaled)
    m, n = A.shape
    columns, rows = A.sum(axis=0), A.sum(axis=1)
    squares = A * A

    def up(value: float, num_operations: int) -> float:
        return mul_up(inflate(value, num_operations=num_operations), scale)

    return MatrixSums(
        num_in=n,
        num_out=m,
        largest_entry=mul_up(float(A.max()), scale),
        column_l1=up(float(columns.max()), m),
        column_l2=up(sqrt_up(float(squares.sum(axis=0).max())), m + 2),
        row_l1=up(float(rows.max()), n),
        row_l2=up(sqrt_up(float(squares.sum(axis=1).max())), n + 2),
        columns_l1_l2=up(sqrt_up(float(columns @ columns)), m + n + 4),
        rows_l1_l2=up(sqrt_up(float(rows @ rows)), m + n + 4),
        total_l1=up(float(columns.sum()), m + n),
    )


def matrix_table(W: FloatArray) -> NormTable:
    """Norm table of a dense matrix.

    Args:
        W: float64, shape (m, n), m outputs and n inputs.

    Returns:
        The table; 1→q, p→∞ and 2→2 are exact up to rounding.

    Raises:
        ValueError: if W is empty or holds NaN or infinity.

    Guarantee: every entry is at or above the true operator norm.

    Source: N. J. Higham (2002), §6.2, for the closed forms; `spectral` for 2→2.

    Example:
        >>> [round(value, 12) for value in matrix_table(np.array([[3.0, 0.0], [4.0, 1.0]]))[0]]
        [7.0, 5.0, 4.0]
    """
    return table_from_sums(matrix_sums(W), spectral=largest_singular_value_up(W))


def cumulative_table(length: int) -> NormTable:
    """Norm table of the running sum of `length` entries, the triangular matrix L of ones.

    Args:
        length: entries, at least 1.

    Returns:
        The table; every entry is exact up to rounding.

    Guarantee: at or above the norms of L. All entries are at least 0, so the ℓ∞ ball's norms are taken at x = 1:
        ∞→1 Σ i, ∞→2 √(Σ i²); 2→1 is the norm of the column sums. 2→2: the eigenvalues of (L·Lᵀ)⁻¹ are
        4·sin²((2k − 1)π/(4n + 2)) for k = 1, …, n, so ‖L‖₂ = 1/(2·sin(π/(4n + 2))).

    Source: the inverse of L·Lᵀ is the second difference with one free end; its eigenvectors are sines.

    Example:
        >>> cumulative_table(2)[0]
        (2.0, 1.4142135623730951, 1.0)
    """
    n = length
    whole, many = float(n), float(n * (n + 1) // 2)
    squares = n * (n + 1) * (2 * n + 1) // 6
    root = sqrt_up(math.nextafter(float(squares), math.inf) if float(squares) < squares else float(squares))
    # sin is off by less than 1 ulp, its argument by 2 roundings; π/(4n + 2) ≤ π/6, where sin's condition is at most 1.
    spectral = inflate(1.0 / (2.0 * math.sin(math.pi / (4 * n + 2))), num_operations=8)
    return (
        (whole, sqrt_up(whole), 1.0),
        (root, spectral, sqrt_up(whole)),
        (many, root, whole),
    )


def diagonal_table(d: FloatArray, *, repeats: int) -> NormTable:
    """Norm table of a diagonal operator whose diagonal is `d` repeated.

    Args:
        d: float64 multipliers, any shape, at least one.
        repeats: how often each multiplier stands on the diagonal.

    Returns:
        The table: max |d| for p ≤ q, ‖d‖ sums for ∞→1, ∞→2 and 2→1; every entry is exact up to rounding.

    Raises:
        ValueError: if d holds NaN or infinity.

    Example:
        >>> diagonal_table(np.array([2.0, -3.0]), repeats=1)[0]
        (3.0, 3.0, 3.0)
    """
    scaled, scale = scale_to_unit(d)
    magnitudes = np.abs(scaled).ravel()
    largest = mul_up(float(magnitudes.max()), scale)
    total = inflate(float(magnitudes.sum()), num_operations=magnitudes.size)
    squares = inflate(float(magnitudes @ magnitudes), num_operations=magnitudes.size + 1)
    l1 = mul_up(mul_up(total, float(repeats)), scale)
    l2 = mul_up(sqrt_up(mul_up(squares, float(repeats))), scale)
    base = lipschitz_table(largest, size=magnitudes.size * repeats)
    return (
        base[0],
        (min(l2, base[1][0]), largest, largest),
        (min(l1, base[2][0]), min(l2, base[2][1]), largest),
    )
