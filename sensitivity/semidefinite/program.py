"""A network of quadratic constraints: the largest output that any differences within them can have.

Letters: z_0 = x the difference of two inputs; u_k = Σ_i A_ki·z_i over i < k; z_k within constraint k of u_k; y = Σ_i
A_yi·z_i. A program asks for the largest ‖y‖_q over ‖x‖_p ≤ 1; every pair of records of the head gives such differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sensitivity.rounding import FloatArray
from sensitivity.semidefinite.constraints import Constraint, IntArray

DENSE_SHARE = 0.08  # from here on a dense product is faster than a sparse one
DENSE_ENTRIES = 20_000_000
Numbers = NDArray[np.float64] | NDArray[np.complex128]
Matrix = sparse.csr_array | Numbers


@dataclass(frozen=True, kw_only=True)
class Program:
    """See the module's text.

    Attributes:
        num_in: entries of x.
        num_out: entries of y.
        reads: per knot, and last for the output: source → matrix.
        constraints: one per knot.
        errors: (reader, source) → Frobenius norm of the true matrix minus the given one, at most, where it is not 0.
    """

    num_in: int
    num_out: int
    reads: tuple[dict[int, Matrix], ...]
    constraints: tuple[Constraint, ...]
    errors: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of x and of every z_k."""
        return (self.num_in, *(constraint.size for constraint in self.constraints))

    @property
    def num_entries(self) -> int:
        """Entries of all matrices, as their products see them."""
        return sum(num_stored(A) for terms in self.reads for A in terms.values())

    def suited(self) -> Program:
        """The same with matrices as dense as their products are fast."""
        reads = tuple({i: suited(sparse.csr_array(A)) for i, A in terms.items()} for terms in self.reads)
        return replace(self, reads=reads)


def restricted(program: Program, kept: list[IntArray], *, rows: list[IntArray]) -> Program:
    """A program on some entries, where all others are 0.

    Args:
        program: the whole.
        kept: entries of x and of every z_k to keep.
        rows: entries of every u_k, and of y, to keep: all that what is kept can reach.

    Returns:
        The smaller program, its matrices dense where they are small or full.
    """
    reads = []
    for terms, chosen in zip(program.reads, rows, strict=True):
        made: dict[int, Matrix] = {}
        for i, A in terms.items():
            local = sparse.csr_array(sparse.csr_array(sparse.csr_array(A)[chosen])[:, kept[i]])
            if num_stored(local):
                made[i] = suited(local)
        reads.append(made)
    return Program(
        num_in=kept[0].size,
        num_out=rows[-1].size,
        reads=tuple(reads),
        constraints=tuple(
            constraint.restricted(kept[k], rows[k - 1]) for k, constraint in enumerate(program.constraints, start=1)
        ),
    )


def adjoint(A: Numbers) -> Numbers:
    """Transpose, conjugated where complex; of every matrix of a stack."""
    turned: Numbers = np.swapaxes(A, -1, -2)
    return turned.conj() if np.iscomplexobj(A) else turned


def num_stored(A: Matrix) -> int:
    """Entries that a product reads."""
    return A.nnz if isinstance(A, sparse.csr_array) else A.size


def values_of(A: Matrix) -> Numbers:
    """Stored values, in any order."""
    values: Numbers = A if isinstance(A, np.ndarray) else A.data
    return values


def suited(A: sparse.csr_array) -> Matrix:
    """A matrix as dense as its products are fast."""
    entries = A.shape[0] * A.shape[1]
    if entries <= DENSE_ENTRIES and A.nnz > DENSE_SHARE * entries:
        dense: FloatArray = np.ascontiguousarray(A.toarray())
        return dense
    return A
