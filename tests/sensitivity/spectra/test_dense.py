import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensitivity.spectra import dense as spectral
from sensitivity.spectra.dense import largest_singular_value_up


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([1e-200, 1e-3, 1.0, 1e150]))
def test_no_largest_singular_value_is_above_its_certificate(m, n, seed, scale):
    W = np.random.default_rng(seed).normal(size=(m, n)) * scale
    with mpmath.workdps(40):
        truth = max(mpmath.svd_r(mpmath.matrix(W.tolist()), compute_uv=False))
        bound = largest_singular_value_up(W)
        assert mpmath.mpf(bound) >= truth
        assert mpmath.mpf(bound) <= truth * (1 + mpmath.mpf("1e-12"))


def test_complex_stacks_are_bounded_by_their_worst_matrix():
    random = np.random.default_rng(0)
    stack = random.normal(size=(50, 4, 6)) + 1j * random.normal(size=(50, 4, 6))
    truth = np.linalg.norm(stack, 2, axis=(1, 2)).max()
    assert truth * (1 - 1e-14) <= largest_singular_value_up(stack) <= truth * (1 + 1e-11)


@pytest.mark.parametrize("guess", [0.0, 0.5, 0.999999])
def test_a_guess_that_is_too_small_is_raised_by_the_certificate(guess, monkeypatch):
    """Mutation caught: trusting the guess (power iteration, Lanczos) instead of the factorisation."""
    W = np.random.default_rng(1).normal(size=(6, 9))
    truth = float(np.linalg.norm(W, 2))
    full = spectral._full_guess
    monkeypatch.setattr(spectral, "_quick_guess", lambda gram: guess * full(gram))
    monkeypatch.setattr(spectral, "_full_guess", lambda gram: guess * full(gram))
    assert largest_singular_value_up(W) >= truth


def test_the_lanczos_guess_for_large_matrices_is_certified_too():
    W = np.random.default_rng(2).normal(size=(130, 200))
    truth = float(np.linalg.norm(W, 2))
    assert truth * (1 - 1e-14) <= largest_singular_value_up(W) <= truth * (1 + 1e-10)


def test_unit_rows_are_not_a_unit_singular_value():
    """Mutation caught: bounding by the largest row norm. Two equal unit rows have norm sqrt(2)."""
    row = np.array([0.6, 0.8])
    assert largest_singular_value_up(np.stack([row, row])) >= math.sqrt(2.0)


def test_equal_singular_values_and_rank_one_matrices_are_certified():
    assert 3.0 <= largest_singular_value_up(3.0 * np.eye(40)) <= 3.0 * (1 + 1e-12)
    assert 20.0 <= largest_singular_value_up(np.ones((16, 25))) <= 20.0 * (1 + 1e-12)


def test_zero_is_exact_and_non_finite_is_refused():
    assert largest_singular_value_up(np.zeros((3, 4))) == 0.0
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            largest_singular_value_up(np.array([[1.0, bad]]))
