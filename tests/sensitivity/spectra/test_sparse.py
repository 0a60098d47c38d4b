import itertools
import math
import tracemalloc

import numpy as np
import pytest
from dense_oracle import EXACT_PAIRS, dense_norm
from nine_norms import largest_over_signs
from scipy import sparse

from sensitivity.norms import NORMS
from sensitivity.spectra.banded import PIECE_ENTRIES
from sensitivity.spectra.sparse import sparse_sums, sparse_table

ENOUGH = 1e8


def true_norm(W, p, q):
    """Any of the nine norms; the NP-hard ones over all sign vectors."""
    if (p, q) in [*EXACT_PAIRS, (2, 2)]:
        return dense_norm(W, p, q)
    A = W.T if (p, q) == (2, 1) else W
    return largest_over_signs(A, 1 if (p, q) == (math.inf, 1) else 2)


@pytest.mark.parametrize("block", range(4))
def test_no_norm_of_240_sparse_matrices_with_errors_is_above_its_table(block):
    """Mutations caught: rows for columns, an error counted once for all norms, empty rows that shift sums."""
    for seed in range(60 * block, 60 * block + 60):
        random = np.random.default_rng(seed)
        m, n = random.integers(1, 11, size=2)
        A = random.normal(size=(m, n)) * (random.random((m, n)) < random.uniform(0.1, 1.0)) * 10.0 ** (seed % 7 - 3)
        u, v = random.choice([-1.0, 1.0], size=m), random.choice([-1.0, 1.0], size=n)
        E = np.outer(u, v) if seed % 4 == 1 else random.normal(size=(m, n))
        error = 0.0 if seed % 2 == 0 else 0.2 * float(np.linalg.norm(A)) + 0.01
        E *= error / np.linalg.norm(E)
        table, how = sparse_table(
            sparse.csr_array(A), error_frobenius=error * (1 + 1e-12), flops=0.0 if seed % 3 == 0 else ENOUGH
        )
        assert how
        for (i, p), (j, q) in itertools.product(enumerate(NORMS), repeat=2):
            truth = true_norm(A + E, p, q)
            assert table[i][j] >= truth * (1 - 1e-14), (seed, p, q)
            if error == 0.0 and (p, q) in EXACT_PAIRS:
                assert table[i][j] <= truth * (1 + 1e-12), (seed, p, q)
        if error == 0.0 and seed % 3:
            assert table[1][1] <= dense_norm(A, 2, 2) * (1 + 1e-6), seed


def test_sums_over_pieces_are_those_of_the_whole():
    """More entries than one piece holds, rows without entries at every cut."""
    random = np.random.default_rng(0)
    A = sparse.random_array((3000, 2700), density=0.2, rng=random, format="lil")
    A[::7] = 0.0
    A = sparse.csr_array(A.tocsr())
    A.eliminate_zeros()
    assert A.nnz > 1.2 * PIECE_ENTRIES
    full = np.abs(A.toarray())
    sums, frobenius = sparse_sums(A, scale=1.0)
    for value, truth in (
        (sums.column_l1, full.sum(axis=0).max()),
        (sums.row_l1, full.sum(axis=1).max()),
        (sums.column_l2, np.sqrt((full**2).sum(axis=0).max())),
        (sums.row_l2, np.sqrt((full**2).sum(axis=1).max())),
        (sums.columns_l1_l2, np.linalg.norm(full.sum(axis=0))),
        (sums.rows_l1_l2, np.linalg.norm(full.sum(axis=1))),
        (sums.total_l1, full.sum()),
        (sums.largest_entry, full.max()),
        (frobenius, np.linalg.norm(full)),
    ):
        assert truth * (1 - 1e-13) <= value <= truth * (1 + 1e-11)


def test_memory_stays_below_half_a_matrix_more_when_no_gram_matrix_fits():
    A = sparse.csr_array(sparse.random_array((40_000, 50_000), density=2e-3, rng=np.random.default_rng(1)).tocsr())
    size = A.data.nbytes + A.indices.nbytes + A.indptr.nbytes
    tracemalloc.start()
    table, how = sparse_table(A, error_frobenius=0.0, flops=1e9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert how == "row and column sums"
    assert table[0][0] > 0.0
    assert peak < 0.5 * size


def test_zero_matrices_have_the_norms_of_their_error_and_bad_input_is_refused():
    """Hand work: ‖E‖_F ≤ 1 gives ∞→1 at most √6, ∞→2 at most √3 and 2→1 at most √2 for 2×3 matrices."""
    zero = sparse.csr_array((2, 3))
    assert sparse_table(zero, error_frobenius=0.0, flops=ENOUGH)[0] == ((0.0,) * 3,) * 3
    table, how = sparse_table(zero, error_frobenius=1.0, flops=ENOUGH)
    assert how == "zero matrix"
    assert table[2][0] == pytest.approx(math.sqrt(6))
    assert table[2][1] == pytest.approx(math.sqrt(3))
    assert table[1][0] == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="NaN or infinity"):
        sparse_table(sparse.csr_array([[math.nan, 1.0]]), error_frobenius=0.0, flops=ENOUGH)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="Frobenius error"):
            sparse_table(zero, error_frobenius=bad, flops=ENOUGH)
    with pytest.raises(ValueError, match="must not be empty"):
        sparse_table(sparse.csr_array((0, 3)), error_frobenius=0.0, flops=ENOUGH)
