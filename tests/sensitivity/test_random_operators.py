"""No certificate below the truth: 2,000 random operators through the public face, in every pair of norms.

Every matrix is asked for all nine norms; every module for two, in turn, so that each family meets all nine alike.
Truths are those of the dense matrix, by brute force over sign vectors for ∞→1, ∞→2 and 2→1 of up to 14 rows or columns
(dual sides count), and for curved operators those of their Jacobians.
"""

import numpy as np
import pytest
from dense_oracle import dense_matrix
from random_operators import CURVED, LINEAR, NINE, drawn, jacobians, true_norm

from sensitivity import certify, operator_norm

NUM_MATRICES, BLOCK = 1000, 100
PER_FAMILY = 64
ROUNDING = 1e-13  # relative: of the truths themselves, which are computed in float64
BACKWARD = 1e-7  # relative: torch's derivatives of hardsigmoid and celu are those of float32
METHODS = ("auto", "fast")
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def test_2000_operators_are_compared():
    assert NUM_MATRICES + PER_FAMILY * (len(LINEAR) + len(CURVED)) >= 2000


def random_matrix(seed):
    """Sides up to 14, sparsity, scales of columns and of the whole, equal and repeated rows."""
    random = np.random.default_rng(seed)
    m, n = random.integers(1, 15, size=2)
    W = random.normal(size=(m, n)) * (random.random((m, n)) < random.uniform(0.2, 1.0))
    if seed % 4 == 1:
        W = np.sign(W)
    elif seed % 4 == 2:
        W *= 10.0 ** random.uniform(-6, 6, size=n)
    elif seed % 8 == 3:
        W[:] = W[0]
    W *= 10.0 ** random.uniform(-100, 100) if seed % 5 == 0 else 1.0
    return W.astype(np.float32) if seed % 3 == 0 and np.abs(W).max() < 1e30 else W


@pytest.mark.parametrize("block", range(NUM_MATRICES // BLOCK))
def test_no_matrix_has_a_norm_above_its_bound(block):
    """Mutations caught: any of the nine a millionth too small."""
    sharp = compared = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        W = random_matrix(seed)
        for p, q in NINE:
            truth, bound = true_norm(W.astype(np.float64), p, q), operator_norm(W, p=p, q=q)
            assert bound >= truth * (1 - ROUNDING), (seed, p, q)
            sharp += bound <= truth * (1 + 1e-7)
            compared += 1
    assert compared == 9 * BLOCK
    assert sharp >= 0.7 * compared


@pytest.mark.parametrize("family", LINEAR)
def test_no_linear_operator_has_a_norm_above_its_certificate(family):
    sharp = 0
    for seed in range(PER_FAMILY):
        head, shape = drawn(family, seed)
        W = dense_matrix(head, shape)
        for turn in range(2):
            p, q = NINE[(2 * seed + turn) % 9]
            truth = true_norm(W, p, q)
            certificate = certify(head, p=p, q=q, input_shape=shape, method=METHODS[turn])
            assert certificate.slack == 0.0
            assert certificate.value >= truth * (1 - ROUNDING), (seed, p, q, head)
            sharp += certificate.value <= truth * (1 + 1e-4)
    assert sharp >= 0.5 * 2 * PER_FAMILY  # else the comparison would notice little


@pytest.mark.parametrize("family", CURVED)
def test_no_jacobian_of_a_curved_operator_has_a_norm_above_its_certificate(family):
    near = 0
    for seed in range(PER_FAMILY):
        head, shape = drawn(family, seed)
        found = jacobians(head, shape, seed=seed)
        for turn in range(2):
            p, q = NINE[(2 * seed + turn) % 9]
            truth = max(true_norm(J, p, q) for J in found)
            value = certify(head, p=p, q=q, input_shape=shape, method=METHODS[turn]).value
            assert value >= truth * (1 - BACKWARD), (seed, p, q, head)
            near += value <= truth * 1.02
    assert near >= 0.5 * 2 * PER_FAMILY
