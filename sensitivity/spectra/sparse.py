"""All nine norms of a sparse matrix that is known up to an error.

Letters: A (m×n) the stored matrix, E the error, ‖E‖_F ≤ ε. With ‖·‖_{p→q} ≤ n^{max(0, 1/2−1/p)}·m^{max(0, 1/q−1/2)}·‖·‖₂
each norm of A + E is at most that of A plus such a multiple of ε.
Sums run over pieces of A, so that memory stays below about 1.1 times A, plus the Gram matrix where one is built.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import sparse

from sensitivity.norms import NORMS, NormTable, Row, change_of_norm
from sensitivity.operators.linear import MatrixSums, table_from_sums
from sensitivity.rounding import FloatArray, add_up, inflate, mul_up, require_bound, sqrt_up
from sensitivity.spectra.banded import (
    PIECE_ENTRIES,
    canonical,
    column_counts,
    is_monomial,
    largest_magnitude,
    singular_value_up,
)
from sensitivity.spectra.scaling import inf_to_1_up, inf_to_2_up, two_to_1_up

MAX_SCALED_ENTRIES = 1_500_000  # a dense copy for diagonal scaling: 12 MB


def sparse_table(
    A: sparse.csr_array, *, error_frobenius: float, flops: float, hard: bool = True
) -> tuple[NormTable, str]:
    """Norm table of a sparse matrix.

    Args:
        A: shape (m, n), float64.
        error_frobenius: bound on the Frobenius norm of (true matrix − A).
        flops: floating-point operations to spend on 2→2 and on ∞→1, ∞→2 and 2→1.
        hard: spend on the last three; else their entrywise bounds stand.

    Returns:
        The table and how 2→2 was certified, in words. With no error 1→q and p→∞ are exact up to rounding.

    Raises:
        ValueError: if A is empty, or holds NaN, infinity or duplicate entries, or if error_frobenius is not a number
            of at least 0.

    Guarantee: every entry is at or above the norm of every matrix within `error_frobenius` of A.

    Edge cases: a matrix without nonzero entries gives the norms of the error.

    Example:
        >>> table, how = sparse_table(sparse.csr_array([[3.0, 0.0], [4.0, 1.0]]), error_frobenius=0.0, flops=1e7)
        >>> [round(value, 12) for value in table[0]], how
        ([7.0, 5.0, 4.0], 'dense Cholesky')
    """
    require_bound(error_frobenius, what="the Frobenius error of a sparse matrix")
    m, n = A.shape
    if m == 0 or n == 0:
        raise ValueError(f"a matrix of shape {A.shape} has no operator norm: it must not be empty; reshape it")
    A = canonical(A)
    largest = largest_magnitude(A)
    if largest == 0.0:
        table, how = _constant_table(0.0), "zero matrix"
    else:
        scale = math.ldexp(1.0, min(max(math.frexp(largest)[1], -1000), 1000))
        sums, frobenius = sparse_sums(A, scale=scale)
        found = singular_value_up(A, error=0.0, flops=0.6 * flops)
        spectral, how = (frobenius, "Frobenius norm") if found is None else found
        table = table_from_sums(sums, spectral=spectral)
        if found is None and table[1][1] < frobenius:
            how = "row and column sums"
        table = _with_scaling(A, table, flops=0.4 * flops) if hard else table
    if error_frobenius > 0.0:
        table = _plus_error(table, error_frobenius, num_in=n, num_out=m)
    return table, how


def spectral_flops(A: sparse.csr_array) -> float:
    """About the most work that `sparse_table` can use on A; more than this would change nothing.

    Args:
        A: shape (m, n).

    Returns:
        Floating-point operations, estimated before anything is computed: dense certificates of 2→2 and, where they are
        tried, of the three norms by scaling.

    Example:
        >>> spectral_flops(sparse.csr_array(np.eye(5)))
        0.0
    """
    m, n = A.shape
    if is_monomial(A):
        return 0.0
    small, large = sorted((m, n))
    dense = 2.0 * float(small) ** 2 * large + 3.0 * float(small) ** 3 + 400.0 * float(small) ** 2
    scaled = 3.0 * (dense + 5.0 * float(small) ** 3 + 4e3 * small * large) if m * n <= MAX_SCALED_ENTRIES else 0.0
    return dense + scaled


def sparse_sums(A: sparse.csr_array, *, scale: float) -> tuple[MatrixSums, float]:
    """Row and column sums and the Frobenius norm of a sparse matrix, rounded up.

    Args:
        A: shape (m, n), float64, finite, no entry stored twice, not zero.
        scale: a power of two at which the entries have magnitude at most 1 and the largest at least ½, if any can.

    Returns:
        The sums and the Frobenius norm.

    Guarantee: every number is at or above the true one.
    """
    m, n = A.shape
    columns, column_squares = np.zeros(n), np.zeros(n)
    rows, row_squares = np.zeros(m), np.zeros(m)
    largest = 0.0
    for first, last in _pieces(A):
        start, stop = int(A.indptr[first]), int(A.indptr[last])
        if start == stop:
            continue
        indices = A.indices[start:stop]
        magnitudes = np.abs(A.data[start:stop]) / scale
        largest = max(largest, float(magnitudes.max()))
        columns += np.bincount(indices, weights=magnitudes, minlength=n)
        occupied = first + np.flatnonzero(np.diff(A.indptr[first : last + 1]))
        offsets = A.indptr[occupied] - start
        rows[occupied] = np.add.reduceat(magnitudes, offsets)
        np.square(magnitudes, out=magnitudes)
        column_squares += np.bincount(indices, weights=magnitudes, minlength=n)
        row_squares[occupied] = np.add.reduceat(magnitudes, offsets)

    def up(value: float, num_operations: int) -> float:
        return mul_up(inflate(value, num_operations=num_operations), scale)

    sums = MatrixSums(
        num_in=n,
        num_out=m,
        largest_entry=mul_up(largest, scale),
        column_l1=up(float(columns.max()), m + 2),
        column_l2=up(sqrt_up(float(column_squares.max())), m + 4),
        row_l1=up(float(rows.max()), n + 2),
        row_l2=up(sqrt_up(float(row_squares.max())), n + 4),
        columns_l1_l2=up(sqrt_up(float(columns @ columns)), m + n + 6),
        rows_l1_l2=up(sqrt_up(float(rows @ rows)), m + n + 6),
        total_l1=up(float(columns.sum()), m + n + 2),
    )
    return sums, up(sqrt_up(float(row_squares.sum())), m + n + 6)


def _pieces(A: sparse.csr_array) -> list[tuple[int, int]]:
    """Ranges of whole rows of about a million entries; a longer row is a piece of its own."""
    m = A.shape[0]
    targets = np.arange(0, int(A.indptr[-1]), PIECE_ENTRIES)
    cuts = np.unique(np.concatenate([[0], np.searchsorted(A.indptr, targets, side="left"), [m]]))
    return [(int(a), int(b)) for a, b in itertools.pairwise(cuts)]


def _with_scaling(A: sparse.csr_array, table: NormTable, *, flops: float) -> NormTable:
    """The three NP-hard norms by diagonal scaling where a dense copy of the occupied part is small."""
    rows = np.flatnonzero(np.diff(A.indptr))
    columns = np.flatnonzero(column_counts(A))
    if rows.size * columns.size > MAX_SCALED_ENTRIES:
        return table
    smaller, larger = sorted((rows.size, columns.size))
    if 3.0 * (2.0 * float(smaller) ** 2 * larger + 8.0 * float(smaller) ** 3) > flops:
        return table
    place = np.zeros(A.shape[1], dtype=np.int64)
    place[columns] = np.arange(columns.size)
    dense: FloatArray = np.zeros((rows.size, columns.size))
    counts = np.diff(A.indptr)[rows]
    dense[np.repeat(np.arange(rows.size), counts), place[A.indices]] = A.data
    share = flops / 3.0
    two_one, inf_two = two_to_1_up(dense, flops=share), inf_to_2_up(dense, flops=share)
    inf_one = inf_to_1_up(dense, flops=share)
    (one, two, inf) = table
    return (
        one,
        (min(two[0], two_one), two[1], two[2]),
        (min(inf[0], inf_one), min(inf[1], inf_two), inf[2]),
    )


def _constant_table(value: float) -> NormTable:
    row: Row = (value, value, value)
    return row, row, row


def _plus_error(table: NormTable, error: float, *, num_in: int, num_out: int) -> NormTable:
    rows: list[Row] = []
    for r, row in zip(NORMS, table, strict=True):
        grown = mul_up(change_of_norm(r, 2, size=num_in), error)
        entries = [add_up(row[j], mul_up(grown, change_of_norm(2, s, size=num_out))) for j, s in enumerate(NORMS)]
        rows.append((entries[0], entries[1], entries[2]))
    return rows[0], rows[1], rows[2]
