"""Linear maps as sparse matrices with a bound on their error, and the work that merging them may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from sensitivity.norms import NormTable, added_table, lipschitz_table, product_table, scaled_table
from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, add_up, gamma, inflate, mul_up, sqrt_up

MAX_ENTRIES = 24_000_000  # entries of one matrix: 290 MB
NO_BOUND: NormTable = ((math.inf,) * 3, (math.inf,) * 3, (math.inf,) * 3)


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """A linear map, known up to an error.

    Attributes:
        matrix: shape (outputs, inputs), float64.
        error: Frobenius norm of true map − matrix, at most.
        table: norms of the true map that are known otherwise; infinity where nothing is.
        is_product: whether it was merged from several operators, so that norms of its own can be smaller.
    """

    matrix: sparse.csr_array
    error: float
    table: NormTable = NO_BOUND
    is_product: bool = True


class TooLargeError(ValueError):
    """Merged maps would exceed the work or memory allowed; only bounds by norms remain."""


@dataclass
class Work:
    """Floating-point operations left, spent by estimate before each step, so that results never depend on a clock."""

    flops: float

    def spend(self, flops: float) -> bool:
        """Take `flops` if they are left; say whether they were."""
        if flops > self.flops:
            return False
        self.flops -= flops
        return True


def identity(size: int) -> LinearMap:
    """The identity on `size` entries."""
    matrix = sparse.csr_array(sparse.eye_array(size, format="csr"))
    return LinearMap(matrix=matrix, error=0.0, table=lipschitz_table(1.0, size=size), is_product=False)


def is_identity(A: sparse.csr_array) -> bool:
    """Whether a matrix is the identity."""
    n = A.shape[0]
    if A.shape[1] != n or A.nnz != n:
        return False
    return bool((A.indices == np.arange(n)).all() and (A.data == 1.0).all() and (np.diff(A.indptr) == 1).all())


def frobenius(A: sparse.csr_array) -> float:
    """Frobenius norm of a matrix, rounded up."""
    largest = float(np.abs(A.data).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    scaled = A.data / largest
    return mul_up(largest, sqrt_up(inflate(float(scaled @ scaled), num_operations=A.nnz + 6)))


def merged(outer: LinearMap, inner: LinearMap, *, work: Work) -> LinearMap:
    """The product of two maps, with its rounding.

    Raises:
        TooLargeError: if it would cost more than is left, or be too large.

    Guarantee: each entry of the product is a sum of at most n products, n the largest number of entries in a row of
        `outer`, so it is off by at most γ_{n+1}(|outer|·|inner|); ‖|A||B|‖_F ≤ ‖A‖_F·‖B‖_F.
    """
    A, B = outer.matrix, inner.matrix
    if inner.error == 0.0 and is_identity(B):
        return outer
    if outer.error == 0.0 and is_identity(A):
        return inner
    cost = product_cost(A, B)
    if most_entries(A, B) > MAX_ENTRIES or not work.spend(20.0 * cost):
        raise TooLargeError(f"merging two maps takes {cost:.2g} products")
    product = sparse.csr_array(A @ B)
    product.sort_indices()
    most = int(np.diff(A.indptr).max(initial=0))
    norm_a, norm_b = frobenius(A), frobenius(B)
    rounding = mul_up(gamma(most + 1), mul_up(norm_a, norm_b))
    carried = add_up(mul_up(outer.error, add_up(norm_b, inner.error)), mul_up(norm_a, inner.error))
    table = product_table(outer.table, inner.table)
    return LinearMap(matrix=product, error=add_up(rounding, carried), table=table)


def most_entries(A: sparse.csr_array, B: sparse.csr_array) -> int:
    """Most entries that A @ B can have."""
    counts = np.bincount(
        np.repeat(np.arange(A.shape[0]), np.diff(A.indptr)),
        weights=np.diff(B.indptr)[A.indices].astype(np.float64),
        minlength=A.shape[0],
    )
    return int(np.minimum(counts, B.shape[1]).sum())


def product_cost(A: sparse.csr_array, B: sparse.csr_array) -> float:
    """Number of scalar products in A @ B."""
    per_row = np.diff(B.indptr).astype(np.float64)
    uses = np.bincount(A.indices, minlength=A.shape[1]).astype(np.float64)
    return float(uses @ per_row)


def scaled_columns(A: LinearMap, factors: FloatArray) -> LinearMap:
    """A·diag(factors), with its rounding (one per entry; none for powers of two)."""
    matrix = A.matrix.copy()
    matrix.data = matrix.data * factors[matrix.indices]
    largest = float(np.abs(factors).max(initial=0.0))
    mantissas = np.abs(np.frexp(factors)[0])
    exact = bool(((mantissas == 0.5) | (mantissas == 0.0)).all())
    rounding = 0.0 if exact else mul_up(2.0 * UNIT_ROUNDOFF, mul_up(frobenius(A.matrix), largest))
    return LinearMap(
        matrix=matrix, error=add_up(mul_up(A.error, largest), rounding), table=scaled_table(A.table, largest)
    )


def summed(first: LinearMap, second: LinearMap) -> LinearMap:
    """A + B, with its rounding (one per entry)."""
    matrix = sparse.csr_array(first.matrix + second.matrix)
    matrix.sort_indices()
    rounding = mul_up(2.0 * UNIT_ROUNDOFF, frobenius(matrix))
    table = added_table([first.table, second.table])
    return LinearMap(matrix=matrix, error=add_up(first.error, second.error, rounding), table=table)


def transpose(A: LinearMap) -> LinearMap:
    """The transposed map; its norm p→q is that of the map from q's dual to p's dual."""
    matrix = sparse.csr_array(A.matrix.T)
    matrix.sort_indices()
    T = A.table
    table = ((T[2][2], T[1][2], T[0][2]), (T[2][1], T[1][1], T[0][1]), (T[2][0], T[1][0], T[0][0]))
    return LinearMap(matrix=matrix, error=A.error, table=table, is_product=A.is_product)


def is_diagonal(A: sparse.csr_array) -> bool:
    """Whether every row reads its own column alone, if any."""
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    return A.shape[0] == A.shape[1] and bool((rows == A.indices).all())


def require_ordinary(A: sparse.csr_array, *, depth: int) -> None:
    """Refuse entries so large that products along the depth could leave the range of float64.

    What underflows is below 2⁻¹⁰⁷⁴ and is multiplied by at most 10²⁵⁰ later on; bounds above 10⁻⁵⁰ have room for it in
    their relative safety, smaller ones are not used.

    Raises:
        TooLargeError: if they could.
    """
    if A.nnz and float(np.abs(A.data).max()) >= 10.0 ** (250.0 / max(depth, 1)):
        raise TooLargeError("entries of extreme size")
