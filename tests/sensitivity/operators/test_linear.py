import math

import numpy as np
import pytest
import torch
from dense_oracle import EXACT_PAIRS, dense_norm
from torch import nn

from sensitivity import operator_norm
from sensitivity.norms import NORMS
from sensitivity.operators.linear import diagonal_table, matrix_table


@pytest.mark.parametrize("seed", range(60))
def test_no_norm_of_a_random_matrix_is_above_its_table(seed):
    random = np.random.default_rng(seed)
    m, n = random.integers(1, 24, size=2)
    W = random.normal(size=(m, n)) * 10.0 ** random.integers(-3, 4)
    table = matrix_table(W)
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        bound, truth = table[NORMS.index(p)][NORMS.index(q)], dense_norm(W, p, q)
        assert truth * (1 - 1e-15) <= bound <= truth * (1 + 1e-12), (p, q)


@pytest.mark.parametrize("seed", range(10))
def test_the_hard_norms_are_bounded_over_every_sign_vector(seed):
    """∞→q is attained at a vertex of the cube and 2→1 is its transpose: brute force over all signs."""
    random = np.random.default_rng(seed)
    m, n = (int(size) for size in random.integers(1, 9, size=2))
    W = random.normal(size=(m, n))
    table = matrix_table(W)

    def largest(A, q):
        signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * A.shape[1])).reshape(A.shape[1], -1)
        return np.linalg.norm(A @ signs, ord=q, axis=0).max()

    assert table[2][0] >= largest(W, 1)
    assert table[2][1] >= largest(W, 2)
    assert table[1][0] >= largest(W.T, 2)


def test_a_linear_layer_acts_by_its_rows():
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0], [3.0, 0.0], [0.0, 5.0]])
    assert operator_norm(layer, p=1, q=1) == pytest.approx(7.0, rel=1e-14)
    assert operator_norm(layer, p="inf", q="inf") == pytest.approx(5.0, rel=1e-14)
    assert operator_norm(layer, p=1, q=math.inf) == 5.0


def test_float32_weights_are_bounded_without_float32_sums():
    """Mutation caught: summing in float32, which falls below the truth for many of these rows (sensitivity,
    rounding)."""
    too_small_in_float32 = 0
    for seed in range(40):
        W = torch.rand(1, 300, generator=torch.Generator().manual_seed(seed)).T.contiguous()
        truth = math.fsum(W.double().flatten().tolist())
        assert operator_norm(W, p=1, q=1) >= truth
        too_small_in_float32 += float(W.sum()) < truth
    assert too_small_in_float32 > 0


def test_a_diagonal_has_the_norms_of_its_matrix():
    d = np.array([0.5, -3.0, 2.0])
    table, dense = diagonal_table(d, repeats=4), matrix_table(np.diag(np.repeat(d, 4)))
    assert table[0] == (3.0, 3.0, 3.0)
    assert table[1][1:] == (3.0, 3.0)
    assert table[1][0] == pytest.approx(math.sqrt(4 * (0.25 + 9 + 4)), rel=1e-12)
    assert table[2][0] == pytest.approx(4 * 5.5, rel=1e-12)
    assert table[2][1] == pytest.approx(math.sqrt(4 * (0.25 + 9 + 4)), rel=1e-12)
    assert np.all(np.array(table) <= np.array(dense) * (1 + 1e-12))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_matrices_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        operator_norm(torch.tensor([[1.0, bad]]), p=1, q=1)


@pytest.mark.parametrize("matrix", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 2, 2)])
def test_what_is_no_matrix_is_refused(matrix):
    with pytest.raises(ValueError, match="2-D and not empty"):
        operator_norm(matrix, p=1, q=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.bool])
def test_matrices_of_other_element_types_are_refused(dtype):
    with pytest.raises(ValueError, match="convert"):
        operator_norm(torch.ones(2, 2).to(dtype), p=1, q=1)


def test_a_layer_whose_norm_depends_on_its_input_needs_the_shape():
    with pytest.raises(ValueError, match="pass the shape of one record"):
        operator_norm(nn.Conv2d(1, 1, 3), p=1, q=1)
    with pytest.raises(ValueError, match="leave it out"):
        operator_norm(torch.eye(2), p=1, q=1, input_shape=(2,))


def test_zero_weights_have_norm_zero():
    for p, q in [*EXACT_PAIRS, (2, 2)]:
        assert operator_norm(torch.zeros(3, 4), p=p, q=q) == 0.0
