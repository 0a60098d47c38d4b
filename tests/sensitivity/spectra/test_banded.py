import math

import numpy as np
import pytest
from scipy import sparse

from sensitivity.spectra import banded
from sensitivity.spectra.banded import lanczos_guess, singular_value_up

ENOUGH = 1e12


def random_band(seed):
    """A matrix whose Gram matrix has a band in its own order, or in a hidden one."""
    random = np.random.default_rng(seed)
    m, n = random.integers(20, 220, size=2)
    near = np.abs(np.arange(m)[:, None] * n / m - np.arange(n)[None, :]) <= random.integers(1, 9)
    A = near * random.normal(size=(m, n)) * (random.random((m, n)) < random.uniform(0.4, 1.0))
    A *= 10.0 ** random.uniform(-30, 30)
    return A[random.permutation(m)][:, random.permutation(n)] if seed % 2 else A


@pytest.mark.parametrize("block", range(4))
def test_no_largest_singular_value_of_200_sparse_matrices_is_above_its_certificate(block):
    """Mutations caught: a Lanczos guess without proof, half a band, rows of one order with columns of another."""
    ways = set()
    for seed in range(50 * block, 50 * block + 50):
        A = random_band(seed)
        truth = np.linalg.norm(A, 2)
        found = singular_value_up(sparse.csr_array(A), error=0.0, flops=ENOUGH)
        assert found is not None
        assert truth * (1 - 1e-14) <= found[0] <= truth * (1 + 1e-6), seed
        ways.add(found[1])
    assert {"banded Cholesky", "dense Cholesky"} <= ways


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_a_guess_that_is_too_small_never_passes(fraction, monkeypatch):
    """Mutation caught: trusting the guess. Far too small a guess gives up; one near by is raised."""
    A = sparse.csr_array(random_band(0))
    truth = np.linalg.norm(A.toarray(), 2)
    honest = lanczos_guess
    monkeypatch.setattr(banded, "lanczos_guess", lambda *args, **named: fraction * honest(*args, **named))
    found = singular_value_up(A, error=0.0, flops=ENOUGH)
    assert found is None or found[0] >= truth
    monkeypatch.setattr(banded, "lanczos_guess", lambda *args, **named: math.nan)
    assert singular_value_up(A, error=0.0, flops=ENOUGH) is None


def test_nan_pivots_do_not_count_as_positive():
    """LAPACK's dpbtrf accepts NaN pivots. Mutation caught: not looking at the factor's diagonal."""
    assert not banded._is_positive_definite(np.array([[1.0, math.nan, 1.0]], order="F"), 1.0)
    assert banded._is_positive_definite(np.array([[1.0, 1.0, 1.0]], order="F"), 1.0)
    assert not banded._is_positive_definite(np.array([[-1.0, 1.0], [5.0, 0.0]], order="F"), 2.0)


def test_the_error_of_the_matrix_is_added():
    random = np.random.default_rng(3)
    A, E = random_band(2), random.normal(size=random_band(2).shape)
    E *= 0.1 * np.linalg.norm(A, 2) / np.linalg.norm(E, 2)
    found = singular_value_up(sparse.csr_array(A), error=float(np.linalg.norm(E, 2)) * (1 + 1e-12), flops=ENOUGH)
    assert found is not None
    u, _, vt = np.linalg.svd(A)
    aligned = np.linalg.norm(E, 2) * np.outer(u[:, 0], vt[0])
    assert found[0] >= np.linalg.norm(A + aligned, 2) * (1 - 1e-14)
    assert found[0] >= np.linalg.norm(A + E, 2)


def test_work_is_planned_before_it_is_done():
    A = sparse.csr_array(random_band(4))
    assert singular_value_up(A, error=0.0, flops=1e3) is None
    assert singular_value_up(A, error=0.0, flops=ENOUGH) == singular_value_up(A, error=0.0, flops=ENOUGH)


def test_channels_that_lie_apart_are_ordered_into_a_small_band():
    """Channel by channel, two channels on a line; pixel by pixel the Gram matrix has bandwidth 5, not 300."""
    line = sparse.diags_array([1.0, 2.0, 0.5], offsets=[-1, 0, 1], shape=(300, 300))
    A = sparse.csr_array(sparse.block_array([[line, -line], [0.3 * line, line]]))
    truth = np.linalg.norm(A.toarray(), 2)
    found = singular_value_up(A, error=0.0, flops=ENOUGH)
    assert found is not None
    assert truth * (1 - 1e-14) <= found[0] <= truth * (1 + 1e-6)


def test_zero_monomial_and_bad_matrices():
    assert singular_value_up(sparse.csr_array((4, 5)), error=0.25, flops=0.0) == (0.25, "zero matrix")
    swap = sparse.csr_array(np.array([[0.0, -3.0], [2.0, 0.0]]))
    assert singular_value_up(swap, error=0.0, flops=0.0) == (3.0, "one entry per row and column")
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            singular_value_up(sparse.csr_array(np.array([[1.0, bad]])), error=0.0, flops=ENOUGH)
    twice = sparse.csr_array((np.array([1.0, 1.0]), np.array([0, 0]), np.array([0, 2])), shape=(1, 1))
    with pytest.raises(ValueError, match="1 entries twice"):
        singular_value_up(twice, error=0.0, flops=ENOUGH)
    unsorted = sparse.csr_array((np.array([4.0, 3.0]), np.array([1, 0]), np.array([0, 2])), shape=(1, 2))
    found = singular_value_up(unsorted, error=0.0, flops=ENOUGH)
    assert found is not None
    assert found[0] == pytest.approx(5.0, rel=1e-12)
