"""Largest singular values of sparse matrices with a certificate: Lanczos guesses, a Cholesky factorisation proves.

For A (m×n, the smaller side k) the Gram matrix G = fl(A·Aᵀ or Aᵀ·A) of a local map has a small bandwidth b, in its
own order, in one that the caller gives, or after reverse Cuthill–McKee. Letters: L the largest number of terms of an
entry of G; A scaled to largest entry in [½, 1).
 |G − exact Gram| ≤ γ_L·|A||A|ᵀ entrywise, so its 2-norm is at most γ_{L+2}·‖A‖₁‖A‖_∞        (Higham 2002, eq. 3.13);
 M = fl(t·I − G) is exact but for one rounding of at most u·(t + G_ii) on its diagonal;
 if Cholesky of M runs to its end, RᵀR = M + E with |E| ≤ γ_{b+3}|Rᵀ||R|: Higham 2002, Thm 10.3, whose inner products
 have at most b + 1 nonzero terms in a band, in any order and blocking (+2 for kernels that multiply by reciprocals).
 The column r_j of R has ‖r_j‖² = M_jj + E_jj ≤ M_jj + γ_{b+3}‖r_j‖², so ‖r_j‖² ≤ M_jj/(1 − γ_{b+3}). |Rᵀ||R| is
 symmetric, has bandwidth b and entries at most max_j ‖r_j‖²; its 2-norm is at most its largest row sum, hence at most
 min(k, 2b + 1)·t·(1 + u)/(1 − γ_{b+3}).
RᵀR is positive semidefinite, so λ_min(M) ≥ −‖E‖₂, and
 λ_max(exact Gram) ≤ t + 1.001·γ_{b+3}·min(k, 2b + 1)·t + 2u·(t + max G_ii) + γ_{L+2}·‖A‖₁‖A‖_∞.
No number here comes from Lanczos: a guess that is too small fails the factorisation and is raised, or gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import LinAlgError, cholesky_banded, eigh_tridiagonal
from scipy.sparse.csgraph import reverse_cuthill_mckee

from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, add_up, gamma, inflate, mul_up, sqrt_up
from sensitivity.spectra.dense import largest_eigenvalue_up

IntArray = NDArray[np.int64]
MAX_BAND_ENTRIES = 60_000_000  # stored diagonals: 480 MB
MAX_GRAM_ENTRIES = 15_000_000  # entries to reorder: 120 MB for each of several index arrays
MAX_DENSE_SIDE = 5_000  # a dense Gram matrix: 200 MB
PIECE_ENTRIES = 2**20
MAX_LANCZOS_STEPS = 400
FIRST_STEP = 1e-7  # relative, above the guess at λ
UNDERFLOW = 2.0**-800
SPARSE_PRODUCT = 20.0  # a sparse product costs about as much time as so many dense flops
CALL_FLOPS = 1e6  # the fixed cost of the calls, so that many tiny matrices are counted


def singular_value_up(A: sparse.csr_array, *, error: float, flops: float) -> tuple[float, str] | None:
    """Upper bound on the largest singular value of a sparse matrix that is known up to an error.

    Args:
        A: shape (m, n), float64.
        error: bound on the 2-norm of (true matrix − A).
        flops: floating-point operations to spend.

    Returns:
        The bound, rounded up, and how it was certified; or None if the work or the memory would not suffice.

    Raises:
        ValueError: if A holds NaN, infinity or duplicate entries.

    Guarantee: at or above the largest singular value of every matrix within `error` of A; see the module's text.

    Edge cases: a matrix without nonzero entries gives `error`.

    Source: N. J. Higham (2002), Accuracy and Stability of Numerical Algorithms, Thm 10.3, adapted to a band.

    Example:
        >>> value, how = singular_value_up(sparse.csr_array([[3.0, 0.0], [4.0, 1.0]]), error=0.0, flops=1e7)
        >>> abs(value - (13 + 160**0.5) ** 0.5) < 1e-6, how
        (True, 'dense Cholesky')
    """
    A = canonical(A)
    largest = largest_magnitude(A)
    if largest == 0.0:
        return error, "zero matrix"
    if is_monomial(A):
        return add_up(largest, error), "one entry per row and column"
    m, n = A.shape
    small, length = min(m, n), max(m, n)
    per_column = column_counts(A)
    per_row = np.diff(A.indptr)
    products = float((per_column if m <= n else per_row).astype(np.float64) @ (per_column if m <= n else per_row))
    dense_product = 2.0 * float(small) ** 2 * length
    use_dense_product = small * length <= MAX_BAND_ENTRIES and dense_product < SPARSE_PRODUCT * products
    spent = CALL_FLOPS + min(dense_product if use_dense_product else math.inf, SPARSE_PRODUCT * products)
    if spent > flops or (not use_dense_product and products > MAX_BAND_ENTRIES):
        return None
    scale = math.ldexp(1.0, min(max(math.frexp(largest)[1], -1000), 1000))
    scaled = sparse.csr_array((A.data / scale, A.indices, A.indptr), shape=A.shape)
    gram_error = mul_up(gamma(int((per_row if m <= n else per_column).max()) + 2), _product_of_sums(scaled))
    gram_error = add_up(gram_error, UNDERFLOW)
    gram = _gram(scaled, use_dense_product)
    found = _gram_eigenvalue_up(gram, error=gram_error, flops=flops - spent)
    if found is None:
        return None
    return add_up(mul_up(sqrt_up(found[0]), scale), error), found[1]


def _gram_eigenvalue_up(gram: FloatArray | sparse.csr_array, *, error: float, flops: float) -> tuple[float, str] | None:
    side = gram.shape[0]
    matvec_flops = 2.0 * float(gram.size if isinstance(gram, np.ndarray) else 4 * gram.nnz)
    dense_flops = float(side) ** 3 + 400.0 * float(side) ** 2 if side <= MAX_DENSE_SIDE else math.inf
    band, coordinates = side, None
    if not isinstance(gram, np.ndarray) and gram.nnz <= MAX_GRAM_ENTRIES:
        coordinates, band = _narrowest(gram)
    banded_flops = 3.0 * side * float(band + 1) ** 2 + 100.0 * matvec_flops
    if coordinates is None or dense_flops <= banded_flops or side <= 64:
        if dense_flops > flops:
            return None
        full = gram if isinstance(gram, np.ndarray) else gram.toarray()
        trace = inflate(float(np.trace(full)), num_operations=side)
        return largest_eigenvalue_up(full[None], error=error, trace=trace), "dense Cholesky"
    if (band + 1) * side > MAX_BAND_ENTRIES:
        return None
    rows, columns, values = coordinates

    def negated() -> FloatArray:
        made = np.zeros((band + 1, side), order="F")
        made[rows - columns, columns] = -values
        return made

    return banded_eigenvalue_up(
        negated,
        band=band,
        side=side,
        product=lambda v: gram @ v,
        product_flops=matvec_flops,
        largest_diagonal=float(gram.diagonal().max()),
        error=error,
        flops=flops,
    )


def banded_eigenvalue_up(
    negated: Callable[[], FloatArray],
    *,
    band: int,
    side: int,
    product: Callable[[FloatArray], FloatArray],
    product_flops: float,
    largest_diagonal: float,
    error: float,
    flops: float,
) -> tuple[float, str] | None:
    """Upper bound on the largest eigenvalue of a positive semidefinite matrix that is near a banded one G.

    Args:
        negated: makes −G afresh, finite: the lower diagonals, shape (band + 1, side), in Fortran order; it is
            overwritten.
        band: number of diagonals below the main one.
        side: rows of G.
        product: v ↦ about G·v, for the guess.
        product_flops: floating-point operations of one product.
        largest_diagonal: bound on the diagonal entries of G.
        error: bound on the 2-norm of (exact matrix − G).
        flops: floating-point operations to spend.

    Returns:
        The bound and "banded Cholesky", or None if the work does not suffice.

    Guarantee: at or above every eigenvalue of every symmetric matrix within `error` of G, whatever `product` does.
    """
    factor_flops = float(side) * float(band + 1) ** 2
    spent = factor_flops + CALL_FLOPS
    if spent + 40.0 * product_flops > flops:
        return None
    num_steps = int(min(MAX_LANCZOS_STEPS, (flops - spent) // max(product_flops, 1.0)))
    # Ritz values may rest at a smaller eigenvalue for some 60 steps; a failed factorisation costs more than waiting.
    num_least = 120 if 240.0 * product_flops <= factor_flops else 40
    guess = lanczos_guess(product, side=side, num_steps=num_steps, num_least=num_least)
    step = max(FIRST_STEP * guess, 8.0 * (band + 3) ** 2 * UNIT_ROUNDOFF * max(guess, largest_diagonal), UNDERFLOW)
    while spent <= flops:
        threshold = max(guess, 0.0) + step
        if not math.isfinite(threshold):
            return None
        if _is_positive_definite(negated(), threshold):
            factor_error = mul_up(1.001 * gamma(band + 3), mul_up(float(min(side, 2 * band + 1)), threshold))
            shift_error = mul_up(2.0 * UNIT_ROUNDOFF, add_up(threshold, largest_diagonal))
            return add_up(threshold, factor_error, shift_error, error), "banded Cholesky"
        step *= 8.0
        spent += factor_flops
    return None


def lanczos_guess(
    product: Callable[[FloatArray], FloatArray], *, side: int, num_steps: int, num_least: int = 0
) -> float:
    """A guess from below at the largest eigenvalue, from a fixed start vector; never trusted, only tried.

    Args:
        product: v ↦ G·v.
        side: length of v.
        num_steps: largest number of products.
        num_least: products before it may settle.

    Returns:
        The largest Ritz value once it and its residual have settled, or after `num_steps` steps.

    Example:
        >>> abs(lanczos_guess(lambda v: np.array([1.0, 3.0]) * v, side=2, num_steps=10) - 3.0) < 1e-9
        True
    """
    current = np.cos(1.7 * np.arange(side, dtype=np.float64) ** 2.1 + 0.3)
    current /= math.sqrt(float(current @ current))
    before, beta = np.zeros(side), 0.0
    alphas: list[float] = []
    betas: list[float] = []
    guess = 0.0
    for step in range(1, num_steps + 1):
        following = product(current) - beta * before
        alpha = float(current @ following)
        following = following - alpha * current
        alphas.append(alpha)
        beta = math.sqrt(float(following @ following))
        stop = step == num_steps or step >= side or not beta > 1e-14 * abs(alpha)
        if step % 10 == 0 or stop:
            top, last = _largest_ritz_pair(alphas, betas)
            settled = step >= num_least and top - guess <= 1e-9 * top and beta * abs(last) <= 1e-5 * top
            guess = max(top, guess)
            if stop or settled:
                return guess
        betas.append(beta)
        before, current = current, following / beta
    return guess


def _largest_ritz_pair(alphas: list[float], betas: list[float]) -> tuple[float, float]:
    """The largest eigenvalue of the tridiagonal matrix and the last entry of its unit eigenvector."""
    last = len(alphas) - 1
    if last == 0:
        return alphas[0], 1.0
    values, vectors = eigh_tridiagonal(np.array(alphas), np.array(betas[:last]), select="i", select_range=(last, last))
    return float(values[0]), float(vectors[-1, 0])


def _is_positive_definite(negated: FloatArray, threshold: float) -> bool:
    negated[0] += threshold
    try:
        factor = cholesky_banded(negated, lower=True, overwrite_ab=True, check_finite=False)
    except LinAlgError:
        return False
    # LAPACK's banded factorisation lets NaN pass its test of the pivots.
    return bool(np.isfinite(factor[0]).all() and (factor[0] > 0.0).all())


def _gram(A: sparse.csr_array, dense: bool) -> FloatArray | sparse.csr_array:
    """A·Aᵀ or Aᵀ·A, whichever is smaller."""
    if dense:
        full = A.toarray()
        made: FloatArray = full @ full.T if A.shape[0] <= A.shape[1] else full.T @ full
        return made
    turned = sparse.csr_array(A.T)
    return sparse.csr_array(A @ turned if A.shape[0] <= A.shape[1] else turned @ A)


def _narrowest(gram: sparse.csr_array) -> tuple[tuple[IntArray, IntArray, FloatArray], int]:
    """The lower triangle (rows, columns, values) in the given or in Cuthill–McKee's order, and the smaller bandwidth."""
    side = gram.shape[0]
    rows = np.repeat(np.arange(side), np.diff(gram.indptr))
    columns = gram.indices.astype(np.int64)
    orders = [np.arange(side), reverse_cuthill_mckee(gram, symmetric_mode=True).astype(np.int64)]
    best, band = orders[0], side + 1
    for candidate in orders:
        place = np.empty(side, dtype=np.int64)
        place[candidate] = np.arange(side)
        width = int(np.abs(place[rows] - place[columns]).max(initial=0))
        if width < band:
            best, band = place, width
    new_rows, new_columns = best[rows], best[columns]
    below = new_rows >= new_columns
    return (new_rows[below], new_columns[below], gram.data[below]), band


def canonical(A: sparse.csr_array) -> sparse.csr_array:
    """A itself, or a copy with sorted columns.

    Raises:
        ValueError: if an entry is stored twice: its parts cannot be bounded one by one.
    """
    if A.has_canonical_format:
        return A
    made = sparse.csr_array(A.copy())
    made.sum_duplicates()
    if made.nnz != A.nnz:
        raise ValueError(
            f"a sparse matrix stores {A.nnz - made.nnz} entries twice: entries must be unique; call sum_duplicates()"
        )
    return made


def column_counts(A: sparse.csr_array) -> IntArray:
    """Stored entries per column; in pieces, as bincount copies 32-bit indices into 64 bits."""
    counts = np.zeros(A.shape[1], dtype=np.int64)
    for start in range(0, A.nnz, PIECE_ENTRIES):
        counts += np.bincount(A.indices[start : start + PIECE_ENTRIES], minlength=A.shape[1])
    return counts


def is_monomial(A: sparse.csr_array) -> bool:
    """Whether no row and no column holds two entries, so that the largest magnitude is the 2-norm."""
    return bool((np.diff(A.indptr) <= 1).all() and (column_counts(A) <= 1).all())


def largest_magnitude(A: sparse.csr_array) -> float:
    """Max |A_ij|.

    Raises:
        ValueError: if an entry is NaN or infinite.
    """
    if A.nnz == 0:
        return 0.0
    largest = max(float(A.data.max()), -float(A.data.min()))  # NaN comes through max and min of numpy
    if not (math.isfinite(largest) and math.isfinite(float(A.data.min()))):
        raise ValueError("a matrix holds NaN or infinity: it has no norms; train again or clip the weights")
    return largest


def _product_of_sums(A: sparse.csr_array) -> float:
    """‖A‖₁‖A‖_∞, rounded up: a bound on ‖|A|‖₂²."""
    magnitudes = sparse.csr_array((np.abs(A.data), A.indices, A.indptr), shape=A.shape)
    m, n = A.shape
    by_column = inflate(float((np.ones(m) @ magnitudes).max()), num_operations=m + 1)
    by_row = inflate(float((magnitudes @ np.ones(n)).max()), num_operations=n + 1)
    return mul_up(by_column, by_row)
