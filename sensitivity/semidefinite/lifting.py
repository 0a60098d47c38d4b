"""Multipliers for a program, guessed from its lifted form: every number becomes a vector of a few entries.

In the lifted program z_k lies in a ball around C·U_k, row by row, and the largest Σ_o ‖y_o‖ (or ‖Y‖_F) is the optimum
of the semidefinite relaxation once vectors are long enough. It is climbed to by taking every direction along the
gradient, all at once: for one layer the mixing method of Wang, Chang and Kolter, here through any graph. At its
stationary points the Lagrangian's gradient in z vanishes, which gives the multipliers. Nothing here is trusted: any
multipliers give a bound, good ones a small one.

Source: M. Fazlyab, A. Robey, H. Hassani, M. Morari, G. Pappas (2019), Efficient and accurate estimation of Lipschitz
 constants for deep neural networks, NeurIPS (slopes, 2→2); P. Wang, W.-C. Chang, J. Z. Kolter (2017), The mixing
 method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sensitivity.rounding import FloatArray
from sensitivity.semidefinite.constraints import TINY, row_lengths, unit_rows
from sensitivity.semidefinite.program import Program

RANK = 16  # a rank of 8 stays some percent short
STEPS = 40  # for unit vectors; a fixed number, so that results do not hang on roundoff
BALL_STEPS = 60
PLAIN_STEPS = 2  # at the end, without momentum
DENSE_SPEED = 0.25  # share of their flops at which dense products count: they run faster than the nominal speed
RANGE = 1e6  # multipliers stay within this factor of their median: a factorisation stands no more


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Weights of the constraints.

    Attributes:
        knots: per knot, one per entry that it writes.
        source: one per entry of x, for p = ∞; ones otherwise.
        output: weights w > 0 with ‖y‖₁² ≤ (Σ 1/w)·Σ w·y²; ones for q = 2.
        value: what the lifted program reached.
    """

    knots: tuple[FloatArray, ...]
    source: FloatArray
    output: FloatArray
    value: float


def lifting_flops(program: Program, *, steps: int) -> float:
    """Work of `multipliers`, as the nominal speed counts it."""
    entries = sum(
        DENSE_SPEED * A.size if isinstance(A, np.ndarray) else A.nnz for terms in program.reads for A in terms.values()
    )
    return 4.0 * RANK * steps * (entries + 10.0 * sum(program.sizes))


def multipliers(
    program: Program, *, p: float, q: float, steps: int, rank: int = RANK, fixed: bool = False
) -> Multipliers:
    """Climb in the lifted program and read off multipliers.

    Args:
        program: the program; one with a single input entry is the same for every p.
        p: 2 or infinity, the norm of x.
        q: 1 or 2, the norm of y.
        steps: how many to take.
        rank: entries of a vector.
        fixed: x is one entry, of length 1.

    Returns:
        The multipliers, all positive and finite.
    """
    count = len(program.constraints)
    source = _directions(program.num_in, rank, seed=0.3)
    if p == 2.0:
        source /= max(float(np.linalg.norm(source)), TINY)
    directions = [c.directed(_directions(c.size, rank, seed=0.7 + 0.1 * k)) for k, c in enumerate(program.constraints)]
    weights: list[FloatArray] = [np.ones(c.size) for c in program.constraints]
    pulls, lengths = np.ones(program.num_in), np.ones(program.num_out)
    value, previous = 0.0, list(directions)
    for step in range(steps):
        Z, U = [source], []
        for k in range(count + 1):
            U.append(_read(program, k, Z, rank))
            if k < count:
                Z.append(program.constraints[k].lifted(U[k], directions[k]))
        lengths = row_lengths(U[count])
        total = float(np.linalg.norm(U[count]))
        value = float(lengths.sum()) if q == 1.0 else total
        if not math.isfinite(value) or value <= 0.0:
            break
        gradient = unit_rows(U[count], lengths) if q == 1.0 else U[count] / total
        pulled: list[FloatArray] = [np.zeros((size, rank)) for size in program.sizes]
        _pull(program, count, gradient, pulled)
        for k in range(count - 1, -1, -1):
            turned, back, weights[k] = program.constraints[k].pulled_back(U[k], pulled[k + 1])
            momentum = step / (step + 3.0) if step < steps - PLAIN_STEPS else 0.0
            ahead = turned + momentum * (turned - previous[k])
            directions[k], previous[k] = program.constraints[k].directed(ahead), turned
            _pull(program, k, back, pulled)
        pulls = row_lengths(pulled[0])
        if not fixed:
            source = (
                unit_rows(pulled[0], pulls) if p == math.inf else pulled[0] / max(float(np.linalg.norm(pulls)), TINY)
            )
    scale = 1.0 if q == 1.0 else max(value, TINY)
    return Multipliers(
        # The gradients are those of ‖Y‖; of ½·Σ w·‖y‖² with w = 1/‖y_o‖ (or 1/‖Y‖) they are the same, so 2·m for Σ w·y².
        knots=tuple(_ordinary(2.0 * m * scale) for m in weights),
        source=_ordinary(pulls) if p == math.inf else np.ones(program.num_in),
        output=1.0 / _ordinary(lengths) if q == 1.0 else np.ones(program.num_out),
        value=value,
    )


def _read(program: Program, k: int, Z: list[FloatArray], rank: int) -> FloatArray:
    """What reader k reads."""
    total: FloatArray = np.zeros((_rows(program, k), rank))
    for i, A in program.reads[k].items():
        total = total + np.asarray(A @ Z[i], dtype=np.float64)
    return total


def _rows(program: Program, k: int) -> int:
    if k == len(program.constraints):
        return program.num_out
    return program.constraints[k].num_read


def _pull(program: Program, k: int, gradient: FloatArray, pulled: list[FloatArray]) -> None:
    """Add what reader k's gradient is worth to its sources."""
    for i, A in program.reads[k].items():
        pulled[i] = pulled[i] + np.asarray(A.T @ gradient, dtype=np.float64)


def _directions(n: int, rank: int, *, seed: float) -> FloatArray:
    """Fixed unit rows without visible pattern, the same on every machine up to roundoff."""
    angles = 7.1 * np.outer(np.arange(1.0, n + 1.0), 1.37 * math.sqrt(2.0) * np.arange(1.0, rank + 1.0) + seed)
    rows: FloatArray = np.cos(angles)
    return unit_rows(rows, row_lengths(rows))


def _ordinary(values: FloatArray) -> FloatArray:
    """Positive and finite, within a range that a factorisation can stand."""
    positive = values[np.isfinite(values) & (values > 0.0)]
    if positive.size == 0:
        return np.ones_like(values)
    middle = float(np.median(positive))
    ordinary: FloatArray = np.clip(np.nan_to_num(values, nan=middle), middle / RANGE, middle * RANGE)
    return ordinary
