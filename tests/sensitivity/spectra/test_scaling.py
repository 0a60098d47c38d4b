import math

import numpy as np
import pytest
from nine_norms import largest_over_signs

from sensitivity.operators.linear import matrix_sums
from sensitivity.spectra import scaling
from sensitivity.spectra.scaling import inf_to_1_up, inf_to_2_up, two_to_1_up

ENOUGH = 1e8


def random_matrix(seed, largest_side=14):
    """Sizes, sparsity, column scales over many magnitudes, signs."""
    random = np.random.default_rng(seed)
    m, n = random.integers(1, largest_side + 1, size=2)
    W = random.normal(size=(m, n)) * (random.random((m, n)) < random.uniform(0.2, 1.0))
    W *= 10.0 ** random.uniform(-4 * (seed % 3), 4 * (seed % 3), size=n)
    return W if seed % 5 else np.abs(W) * 10.0 ** random.uniform(-100, 100)


@pytest.mark.parametrize("block", range(5))
def test_no_sign_vector_exceeds_the_scaled_bounds_of_250_matrices(block):
    """Mutations caught: a sum of d without the root, rows scaled by column scales, an uncertified spectral norm."""
    for seed in range(50 * block, 50 * block + 50):
        W = random_matrix(seed, largest_side=11)
        for bound, truth in (
            (inf_to_2_up(W, flops=ENOUGH), largest_over_signs(W, 2)),
            (two_to_1_up(W, flops=ENOUGH), largest_over_signs(W.T, 2)),
            (inf_to_1_up(W, flops=ENOUGH), largest_over_signs(W, 1)),
        ):
            assert truth * (1 - 1e-14) <= bound, seed


def test_the_mean_excess_on_random_14x14_matrices_is_that_of_the_semidefinite_bound():
    """Golden (sensitivity.md §2): mean ratios 1.026 (∞→2), 1.017 (2→1), 1.125 (∞→1) to brute force."""
    ratios = []
    for seed in range(16):
        W = np.random.default_rng(1000 + seed).normal(size=(14, 14))
        ratios.append(
            (
                inf_to_2_up(W, flops=ENOUGH) / largest_over_signs(W, 2),
                two_to_1_up(W, flops=ENOUGH) / largest_over_signs(W.T, 2),
                inf_to_1_up(W, flops=ENOUGH) / largest_over_signs(W, 1),
            )
        )
    means = np.mean(ratios, axis=0)
    assert np.all(np.min(ratios, axis=0) >= 1 - 1e-14)
    assert means[0] <= 1.03
    assert means[1] <= 1.03
    assert means[2] <= 1.13


@pytest.mark.parametrize("seed", range(6))
def test_any_scales_certify(seed, monkeypatch):
    """Mutation caught: trusting the search. Scales from a random search that knows nothing still give a bound."""
    random = np.random.default_rng(seed)
    monkeypatch.setattr(scaling, "_unit_rows", lambda V: (V, np.exp(random.normal(size=len(V)))))
    W = random.normal(size=(7, 9))
    assert inf_to_2_up(W, flops=ENOUGH) >= largest_over_signs(W, 2)
    assert inf_to_1_up(W, flops=ENOUGH) >= largest_over_signs(W, 1)


def test_bounds_never_exceed_the_entrywise_ones_and_too_little_work_gives_these():
    for seed in range(20):
        W = random_matrix(seed)
        sums = matrix_sums(W)
        for flops in (0.0, ENOUGH):
            assert inf_to_2_up(W, flops=flops) <= sums.rows_l1_l2
            assert two_to_1_up(W, flops=flops) <= sums.columns_l1_l2
            assert inf_to_1_up(W, flops=flops) <= sums.total_l1
    assert inf_to_2_up(W, flops=0.0) == sums.rows_l1_l2


def test_matrices_whose_norm_is_known_by_hand():
    """Rank one u·vᵀ: ∞→2 ‖u‖₂‖v‖₁, 2→1 ‖u‖₁‖v‖₂, ∞→1 ‖u‖₁‖v‖₁. A diagonal: ∞→2 ‖d‖₂, ∞→1 ‖d‖₁."""
    u, v = np.array([3.0, -4.0]), np.array([1.0, -2.0, 2.0])
    W = np.outer(u, v)
    assert inf_to_2_up(W, flops=ENOUGH) == pytest.approx(25.0, rel=1e-9)
    assert two_to_1_up(W, flops=ENOUGH) == pytest.approx(21.0, rel=1e-9)
    assert inf_to_1_up(W, flops=ENOUGH) == pytest.approx(35.0, rel=1e-9)
    d = np.diag([3.0, 0.0, -4.0])
    assert inf_to_2_up(d, flops=ENOUGH) == pytest.approx(5.0, rel=1e-9)
    assert inf_to_1_up(d, flops=ENOUGH) == pytest.approx(7.0, rel=1e-9)


@pytest.mark.parametrize("bound", [inf_to_2_up, two_to_1_up, inf_to_1_up])
def test_zero_is_exact_extremes_survive_and_non_finite_is_refused(bound):
    assert bound(np.zeros((3, 2)), flops=ENOUGH) == 0.0
    assert bound(np.array([[1e-320]]), flops=ENOUGH) >= 1e-320
    assert bound(np.array([[1e300, 1e-300]]), flops=ENOUGH) >= 1e300
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            bound(np.array([[1.0, bad]]), flops=ENOUGH)
    with pytest.raises(ValueError, match="2-D and not empty"):
        bound(np.zeros((0, 2)), flops=ENOUGH)
