"""Semidefinite bounds on a network: its knots as quadratic constraints.

Every pair of records gives differences that satisfy the constraints of `semidefinite.constraints`, so the largest
output of that program bounds the head. Maps are taken as stored; `strays` adds what the true ones can differ by.
An activation that ends the network only weakens what it reads, by at most its steepest slope, entry by entry.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from sensitivity.composing.linear_map import Work, is_identity
from sensitivity.composing.linearised import strays
from sensitivity.composing.network import Knot, Network
from sensitivity.rounding import FloatArray, add_up, mul_up, sqrt_up
from sensitivity.semidefinite.constraints import Constraint, Slopes, WholeNorm, Windows
from sensitivity.semidefinite.footprints import Grids
from sensitivity.semidefinite.program import Matrix, Program, values_of
from sensitivity.semidefinite.relaxation import ball_up, unit_vectors_up
from sensitivity.semidefinite.torus import torus_up

LARGE = 1e30  # steeper slopes and larger weights, and slopes below the inverse, are left to other methods


def relaxed(network: Network, *, p: float, q: float, bounds: FloatArray | None, work: Work) -> float | None:
    """A bound on a network's Lipschitz constant by semidefinite relaxation.

    Args:
        network: the head, with at least one knot.
        p: norm of the input.
        q: norm of the output, 1 or 2.
        bounds: for p = 1, what is known of each input entry, shape (num_in,), errors of the maps included.
        work: what it may cost.

    Returns:
        The bound, rounded up, or None if it does not fit.

    Guarantee: at or above the Lipschitz constant p→q.
    """
    stray = strays(network)[len(network.knots) + 1]
    program, grids, steepest = program_of(network)
    if not math.isfinite(stray) or not program.constraints or not 1.0 / LARGE < steepest < LARGE:
        return None
    factors = [constraint.factor for constraint in program.constraints if isinstance(constraint, WholeNorm)]
    if not all(1.0 / LARGE < factor < LARGE for factor in factors):
        return None  # a knot that writes a constant, say
    if any(float(np.abs(values_of(A)).max(initial=0.0)) > LARGE for terms in program.reads for A in terms.values()):
        return None
    root = sqrt_up(float(network.num_out)) if q == 1.0 else 1.0
    off = mul_up(stray, mul_up(root, sqrt_up(float(network.num_in)) if p == math.inf else 1.0))
    if p == 1.0:
        assert bounds is not None
        known = bounds * ((1.0 + 2.0**-50) / steepest)
        value: float | None = unit_vectors_up(program, q=q, bounds=known, grids=grids, spend=work.spend)
    else:
        candidates = [torus_up(program, grids, spend=work.spend)] if p == q == 2.0 else []
        candidates.append(ball_up(program, p=p, q=q, spend=work.spend))
        value = min((found for found in candidates if found is not None), default=None)
    return None if value is None else add_up(mul_up(value, steepest), off)


def program_of(network: Network) -> tuple[Program, Grids, float]:
    """The program of a network, the shapes of its variables, and a factor for its bounds.

    Guarantee: every pair of inputs gives differences within the constraints, for the maps as stored; where the last
        activation was left out, the factor times the output's norms is at least as large as with it.
    """
    knots, output, shape_out, factor = network.knots, network.output, network.shape_out, 1.0
    reads: list[dict[int, Matrix]] = [{i: A.matrix for i, A in knot.reads.items()} for knot in knots]
    last: dict[int, Matrix] = {i: A.matrix for i, A in output.items()}
    steepest = knots[-1].steepest
    if steepest is not None and list(output) == [len(knots)] and is_identity(output[len(knots)].matrix):
        factor = float(steepest.max(initial=0.0))
        factor = max(factor, 2.0**-1000)
        shares = _powers_above(steepest, top=factor)
        reads.pop()
        last = {i: _scaled_rows(A.matrix, shares) for i, A in knots[-1].reads.items()}
        shape_out, knots = knots[-1].shape_read, knots[:-1]
    program = Program(
        num_in=network.num_in,
        num_out=network.num_out,
        reads=(*reads, last),
        constraints=tuple(_constraint(knot) for knot in knots),
    )
    grids = Grids(
        x=network.shape_in,
        u=(*(knot.shape_read for knot in knots), shape_out),
        z=tuple(knot.shape_written for knot in knots),
    )
    return program, grids, factor


def _powers_above(values: FloatArray, *, top: float) -> FloatArray:
    """The least powers of two whose product with `top` is not below the values; 0 for 0. Scaling by them is exact."""
    _, exponents = np.frexp(values / top)
    powers = np.ldexp(1.0, exponents - 2)
    for _ in range(2):
        powers = np.where(powers * top >= values, powers, powers * 2.0)
    return np.where(values == 0.0, 0.0, powers)


def _scaled_rows(A: sparse.csr_array, factors: FloatArray) -> sparse.csr_array:
    made = sparse.csr_array(A, copy=True)
    made.data = made.data * np.repeat(factors, np.diff(made.indptr))
    return made


def _constraint(knot: Knot) -> Constraint:
    if knot.low is not None and knot.high is not None:
        return Slopes(low=knot.low, high=knot.high).widened()
    if knot.windows is not None:
        return Windows(pattern=knot.windows, counts=np.diff(knot.windows.indptr).astype(np.float64))
    return WholeNorm(factor=knot.table[1][1], size=math.prod(knot.shape_written), num_read=knot.size)
