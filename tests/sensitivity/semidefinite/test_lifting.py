"""Guessed multipliers: always usable, and close to what the relaxation can give."""

import itertools
import math

import numpy as np
import pytest
from scipy import sparse

from sensitivity.semidefinite.constraints import Slopes, WholeNorm, Windows
from sensitivity.semidefinite.lifting import BALL_STEPS, STEPS, Multipliers, lifting_flops, multipliers
from sensitivity.semidefinite.program import Program
from sensitivity.semidefinite.response import norm_up

SIX = [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (math.inf, 1.0), (math.inf, 2.0)]
KRIVINE = math.pi / (2.0 * math.log(1.0 + math.sqrt(2.0)))  # 1.7822: what ∞→1 of the relaxation may exceed the truth by


def climbed(program: Program, p: float, q: float, *, steps: int = BALL_STEPS) -> Multipliers:
    """As `relaxation` calls it; one unit vector of x stands for p = 1."""
    if p == 1.0:
        return multipliers(program, p=2.0, q=q, steps=steps, fixed=True)
    return multipliers(program, p=p, q=q, steps=steps)


def linear(A: np.ndarray) -> Program:
    return Program(num_in=A.shape[1], num_out=A.shape[0], reads=({0: A},), constraints=())


def one_layer(W: np.ndarray, V: np.ndarray, low: float = 0.0, high: float = 1.0) -> Program:
    n = W.shape[0]
    slopes = Slopes(low=np.full(n, low), high=np.full(n, high)).widened()
    return Program(num_in=W.shape[1], num_out=V.shape[0], reads=({0: W}, {1: V}), constraints=(slopes,))


def over_signs(A: np.ndarray, q: float) -> float:
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=A.shape[1]))).T
    return float(np.linalg.norm(A @ signs, ord=q, axis=0).max())


@pytest.mark.parametrize("seed", range(4))
def test_a_linear_program_comes_within_what_theory_allows(seed: int) -> None:
    """Grothendieck and Nesterov: the relaxation of ∞→1 is at most 1.7823 times the truth, of ∞→2 and 2→1 at most √(π/2).

    Above them by 2 % would be a climb that stops short; below the truth, none. Mutants: output weights that are not the
    lengths of lifted rows, source weights that are not the pulls.
    """
    A = np.random.default_rng(seed).normal(size=(7, 8))
    for p, q, truth, most in (
        (math.inf, 1.0, over_signs(A, 1.0), KRIVINE),
        (math.inf, 2.0, over_signs(A, 2.0), math.sqrt(math.pi / 2.0)),
        (2.0, 1.0, over_signs(A.T, 2.0), math.sqrt(math.pi / 2.0)),
        (2.0, 2.0, float(np.linalg.norm(A, 2)), 1.0),
    ):
        found = multipliers(linear(A), p=p, q=q, steps=BALL_STEPS)
        bound = norm_up(linear(A), found, p=p, q=q)
        assert bound is not None
        assert truth * (1 - 1e-12) <= bound <= most * truth * 1.02
        assert found.value <= bound * (1 + 1e-9)


@pytest.mark.parametrize(("p", "q"), SIX)
@pytest.mark.parametrize("seed", range(3))
def test_multipliers_certify_what_the_climb_reached(seed: int, p: float, q: float) -> None:
    """At a stationary point both are the optimum: so they agree within a few percent. Mutants: 2·m without 2, a
    gradient without half, ‖Y‖ for the scale of the multipliers."""
    random = np.random.default_rng(seed)
    num_in = 1 if p == 1.0 else 5
    low, high = ((0.0, 1.0), (-0.3, 1.2), (0.4, 0.9))[seed]
    program = one_layer(random.normal(size=(6, num_in)), random.normal(size=(4, 6)), low, high)
    found = climbed(program, p, q)
    bound = norm_up(program, found, p=2.0 if p == 1.0 else p, q=q)
    assert bound is not None
    assert found.value * (1 - 1e-9) <= bound <= found.value * 1.04


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_windows_and_whole_norms_certify_what_the_climb_reached(p: float) -> None:
    random = np.random.default_rng(5)
    pattern = sparse.csr_array(np.array([[1.0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]))
    program = Program(
        num_in=1 if p == 1.0 else 4,
        num_out=3,
        reads=({0: random.normal(size=(6, 1 if p == 1.0 else 4))}, {1: np.eye(3)}, {2: random.normal(size=(3, 3))}),
        constraints=(
            Windows(pattern=pattern, counts=np.array([3.0, 3.0, 2.0])),
            WholeNorm(factor=0.7, size=3, num_read=3),
        ),
    )
    for q in (1.0, 2.0):
        found = climbed(program, p, q)
        bound = norm_up(program, found, p=2.0, q=q)
        assert bound is not None
        assert found.value * (1 - 1e-9) <= bound <= found.value * 1.1


def test_lifted_values_are_those_of_real_networks_or_more() -> None:
    """Numbers are vectors of one entry, so a good climb is not below the best secants (1 % for a climb cut short)."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        W, V = random.normal(size=(6, 4)), random.normal(size=(3, 6))
        patterns = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
        truth = max(float(np.linalg.norm((V * d) @ W, 2)) for d in patterns)
        assert climbed(one_layer(W, V), 2.0, 2.0).value >= 0.99 * truth
        columns = max(float(np.linalg.norm((V * d) @ W[:, :1], 1)) for d in patterns)
        assert climbed(one_layer(W[:, :1], V), 1.0, 1.0, steps=STEPS).value >= 0.99 * columns


@pytest.mark.parametrize(("p", "q"), SIX)
def test_multipliers_are_positive_finite_and_the_same_each_time(p: float, q: float) -> None:
    """Zero weights, dead entries, one entry, extreme weights: nothing here may turn into NaN, 0 or a warning."""
    random = np.random.default_rng(0)
    for scale in (1.0, 1e-20, 1e20, 0.0):
        W, V = random.normal(size=(4, 1 if p == 1.0 else 3)) * scale, random.normal(size=(3, 4))
        W[1] = 0.0
        V[:, 2] = 0.0
        for program in (
            one_layer(W, V),
            one_layer(V.T[:, :1] if p == 1.0 else V.T, V * scale),
            linear(V[:, :1] * scale),
        ):
            found, again = (climbed(program, p, q, steps=12) for _ in range(2))
            for one, other in zip(
                (*found.knots, found.source, found.output), (*again.knots, again.source, again.output), strict=True
            ):
                assert np.array_equal(one, other)
                assert np.isfinite(one).all()
                assert (one > 0.0).all()
            assert found.source.shape == (program.num_in,)
            assert found.output.shape == (program.num_out,)
            assert [knot.size for knot in found.knots] == list(program.sizes[1:])
            assert math.isfinite(found.value)


def test_work_grows_with_steps_and_entries() -> None:
    small, large = linear(np.ones((3, 3))), linear(np.ones((30, 30)))
    assert lifting_flops(small, steps=40) == 2 * lifting_flops(small, steps=20) > 0
    assert lifting_flops(large, steps=20) > lifting_flops(small, steps=20)
