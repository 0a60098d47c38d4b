"""Whole programs: never below the truth, never above what was known, and within the work allowed."""

import itertools
import math

import numpy as np
import pytest
from scipy import sparse

from sensitivity.semidefinite.constraints import Slopes, WholeNorm
from sensitivity.semidefinite.program import Program
from sensitivity.semidefinite.relaxation import ball_up, unit_vectors_up


class Budget:
    """Work that is left, and all that was asked for."""

    def __init__(self, flops: float) -> None:
        self.left, self.asked = flops, list[float]()

    def __call__(self, flops: float) -> bool:
        self.asked.append(flops)
        if flops > self.left:
            return False
        self.left -= flops
        return True


def everything(flops: float) -> bool:
    return flops >= 0.0


def skip(seed: int, n: int = 14, units: int = 5) -> tuple[Program, list[np.ndarray]]:
    """x + V·relu(W·x), its matrices sparse, and its Jacobians over all patterns."""
    random = np.random.default_rng(seed)
    W, V = random.normal(size=(units, n)), random.normal(size=(n, units))
    program = Program(
        num_in=n,
        num_out=n,
        reads=({0: sparse.csr_array(W)}, {0: sparse.csr_array(np.eye(n)), 1: sparse.csr_array(V)}),
        constraints=(Slopes(low=np.zeros(units), high=np.ones(units)),),
    )
    return program, [np.eye(n) + (V * d) @ W for d in itertools.product([0.0, 1.0], repeat=units)]


@pytest.mark.parametrize("q", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_unit_vectors_are_bounded_closely_from_above(seed: int, q: float) -> None:
    """Mutants: a group bounded by one member, the second largest left as it was, a leader's bound for another column."""
    program, Js = skip(seed)
    truth = np.max([np.linalg.norm(J, ord=q, axis=0) for J in Js], axis=0)
    value = unit_vectors_up(program, q=q, bounds=np.full(14, 1e3), grids=None, spend=everything)
    assert truth.max() * (1 - 1e-13) <= value <= 1.2 * truth.max()
    known = unit_vectors_up(program, q=q, bounds=truth * 1.01, grids=None, spend=everything)
    assert truth.max() * (1 - 1e-13) <= known <= 1.01 * truth.max() * (1 + 1e-15)


@pytest.mark.parametrize("q", [1.0, 2.0])
def test_only_the_largest_bounds_are_bounded_anew(q: float) -> None:
    """Where each entry reaches its own, only those above the answer are worth a factorisation."""
    n = 10
    scale = np.arange(1.0, n + 1.0)
    program = Program(
        num_in=n,
        num_out=n,
        reads=({0: sparse.csr_array(np.diag(scale))}, {1: sparse.csr_array(np.eye(n))}),
        constraints=(Slopes(low=np.zeros(n), high=np.ones(n)),),
    )
    budget = Budget(1e12)
    value = unit_vectors_up(program, q=q, bounds=1.5 * scale, grids=None, spend=budget)
    assert 10.0 <= value <= 10.2  # 7, 8, 9 and 10 have bounds above 10
    assert sum(budget.asked[2:]) == pytest.approx(4 * budget.asked[2])


def test_bounds_of_ball_programs_lie_close_above_the_truth() -> None:
    program, Js = skip(0, n=6)
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=6))).T
    for p, q, truth in (
        (2.0, 2.0, max(float(np.linalg.norm(J, 2)) for J in Js)),
        (2.0, 1.0, max(float(np.linalg.norm(J.T @ signs, axis=0).max()) for J in Js)),
        (math.inf, 2.0, max(float(np.linalg.norm(J @ signs, axis=0).max()) for J in Js)),
        (math.inf, 1.0, max(float(np.linalg.norm(J @ signs, ord=1, axis=0).max()) for J in Js)),
    ):
        value = ball_up(program, p=p, q=q, spend=everything)
        assert value is not None
        assert truth * (1 - 1e-13) <= value <= 1.3 * truth


def test_without_work_nothing_is_claimed_beyond_what_was_known() -> None:
    program, _ = skip(0)
    bounds = np.linspace(1.0, 40.0, 14)
    for flops in (0.0, 1e3, 1e5, 3e5):
        budget = Budget(flops)
        assert unit_vectors_up(program, q=1.0, bounds=bounds, grids=None, spend=budget) <= 40.0
        assert budget.left >= 0.0
    assert unit_vectors_up(program, q=1.0, bounds=bounds, grids=None, spend=Budget(0.0)) == 40.0
    assert ball_up(program, p=2.0, q=2.0, spend=Budget(0.0)) is None
    assert ball_up(program, p=2.0, q=2.0, spend=Budget(1e9)) is not None


def test_the_same_work_gives_the_same_bound() -> None:
    program, _ = skip(1)
    first, second = (
        unit_vectors_up(program, q=1.0, bounds=np.full(14, 50.0), grids=None, spend=Budget(1e9)) for _ in range(2)
    )
    assert first == second


def test_entries_that_never_reach_a_knot_are_bounded_too() -> None:
    """y = [1000·x₀, 2·z] with ‖z‖ ≤ 2·|x₁|: what x₀ reaches holds no entry of the whole norm."""
    program = Program(
        num_in=2,
        num_out=2,
        reads=(
            {0: sparse.csr_array(np.array([[0.0, 1.0]]))},
            {0: sparse.csr_array(np.array([[1e3, 0.0], [0.0, 0.0]])), 1: sparse.csr_array(np.array([[0.0], [2.0]]))},
        ),
        constraints=(WholeNorm(factor=2.0, size=1, num_read=1),),
    )
    for q in (1.0, 2.0):
        value = unit_vectors_up(program, q=q, bounds=np.array([5e3, 5e3]), grids=None, spend=everything)
        assert 1e3 <= value <= 1.01e3


@pytest.mark.parametrize("kind", ["no output", "no input", "both"])
def test_programs_that_move_nothing_are_bounded_without_errors(kind: str) -> None:
    """Zero weights before or behind the activations: the answer is 0, or what was known."""
    n = 3
    W = np.zeros((4, n)) if kind != "no output" else np.ones((4, n))
    V = np.zeros((2, 4)) if kind != "no input" else np.ones((2, 4))
    program = Program(
        num_in=n,
        num_out=2,
        reads=({0: sparse.csr_array(W)}, {1: sparse.csr_array(V)}),
        constraints=(Slopes(low=np.zeros(4), high=np.ones(4)),),
    )
    for q in (1.0, 2.0):
        assert 0.0 <= unit_vectors_up(program, q=q, bounds=np.full(n, 7.0), grids=None, spend=everything) <= 7.0
        for p in (2.0, math.inf):
            value = ball_up(program, p=p, q=q, spend=everything)
            assert value is None or 0.0 <= value < math.inf


def test_a_branch_that_is_zero_leaves_the_others_tight() -> None:
    """x + 0·relu(0·x), as zero-initialised residual branches are: 1, and no warning on the way."""
    n = 4
    program = Program(
        num_in=n,
        num_out=n,
        reads=(
            {0: sparse.csr_array(np.zeros((n, n)))},
            {0: sparse.csr_array(np.eye(n)), 1: sparse.csr_array(np.ones((n, n)))},
        ),
        constraints=(Slopes(low=np.zeros(n), high=np.ones(n)),),
    )
    value = ball_up(program, p=2.0, q=2.0, spend=everything)
    assert value is None or value >= 1.0
    assert 1.0 <= unit_vectors_up(program, q=2.0, bounds=np.full(n, 3.0), grids=None, spend=everything) <= 3.0
