"""The NP-hard norms ∞→2, 2→1 and ∞→1 of a matrix by diagonal scaling, certified for whatever scales were found.

Letters: W (m×n) the matrix; c > 0 (one per column) and r > 0 (one per row) the scales. For |x_j| ≤ 1,
‖diag(c)⁻¹x‖₂ ≤ ‖1/c‖₂, hence
 ‖W‖_{∞→2} ≤ ‖1/c‖₂·‖W·diag(c)‖₂                                 (d = 1/c² in the usual notation);
 ‖W‖_{∞→1} ≤ ‖1/r‖₂·‖1/c‖₂·‖diag(r)·W·diag(c)‖₂                  (signs of the output, |s_i| ≤ 1, on the left);
 ‖W‖_{2→1} = ‖Wᵀ‖_{∞→2}.
These hold for ANY positive scales, so nothing rests on how they were found; the spectral norm is certified by a
Cholesky factorisation. The best scales solve the dual of max ⟨WᵀW, VVᵀ⟩ over V with unit rows: at its optimum
(D − WᵀW)V = 0, so d_j = ‖(WᵀWV)_j‖. V ← rows of WᵀWV made unit (a power method with momentum) climbs to it.
Rounding: each entry of fl(diag(r)·W·diag(c)) is off by at most γ_2 of itself, so the matrix is off by γ_3·‖·‖_F in the
2-norm; W is scaled to largest entry in [½, 1) and the scales lie between 1 and 2¹⁵, so what underflows is below
2⁻⁷⁰⁰ in all.

Source: Y. Nesterov (1998), Semidefinite relaxation and nonconvex quadratic optimization (∞→2); N. Alon, A. Naor (2006)
for ∞→1; the iteration is that of P. Wang, W.-C. Chang, J. Z. Kolter (2017), The mixing method, taken all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sensitivity.operators.linear import matrix_sums
from sensitivity.rounding import FloatArray, add_up, gamma, inflate, mul_up, require_bound, scale_to_unit, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up

MAX_STEPS = 40
LEAST_STEPS = 6
SPREAD = 2.0**-30  # scales d below this share of the largest are raised to it: any positive ones certify
UNDERFLOW = 2.0**-700


def inf_to_2_up(W: FloatArray, *, flops: float) -> float:
    """Upper bound on the largest ‖Wx‖₂ over |x_j| ≤ 1.

    Args:
        W: float64, shape (m, n).
        flops: floating-point operations to spend; too few give the entrywise bound.

    Returns:
        The bound, rounded up; never above the ℓ2 norm of the vector of row ℓ1 norms.

    Raises:
        ValueError: if W is empty, not 2-D, or holds NaN or infinity.

    Guarantee: at or above ‖W‖_{∞→2}; see the module's text.

    Edge cases: a zero matrix gives 0.0; zero rows and columns count for nothing.

    Example:
        >>> round(inf_to_2_up(np.array([[1.0, 1.0], [1.0, -1.0]]), flops=1e6), 9)  # the entrywise bound is 2.83
        2.0
    """
    entrywise = matrix_sums(W).rows_l1_l2
    A, scale = _nonzero_part(W)
    if A.size == 0:
        return 0.0
    smaller, larger = sorted(A.shape)
    rank = _rank(A.shape[1])
    tall = A.shape[1] <= A.shape[0]
    per_step = 2.0 * rank * (A.shape[1] ** 2 if tall else 2 * A.size)
    setup = 2.0 * A.size * A.shape[1] if tall else 0.0
    steps = _affordable(flops, fixed=setup + _certificate_flops(smaller, larger), per_step=per_step)
    if steps is None:
        return entrywise
    gram = A.T @ A if tall else None

    def product(V: FloatArray) -> FloatArray:
        made: FloatArray = gram @ V if gram is not None else A.T @ (A @ V)
        return made

    c = _scales(_ascend(product, _directions(A.shape[1], rank), num_steps=steps))
    value = mul_up(mul_up(_length_of_inverse(c), _scaled_norm(A, np.ones(A.shape[0]), c)), scale)
    return require_bound(min(value, entrywise), what="the ∞→2 norm")


def two_to_1_up(W: FloatArray, *, flops: float) -> float:
    """Upper bound on the largest ‖Wx‖₁ over ‖x‖₂ ≤ 1, which is ‖Wᵀ‖_{∞→2}.

    Args:
        W: float64, shape (m, n).
        flops: floating-point operations to spend; too few give the entrywise bound.

    Returns:
        The bound, rounded up; never above the ℓ2 norm of the vector of column ℓ1 norms.

    Raises:
        ValueError: if W is empty, not 2-D, or holds NaN or infinity.

    Guarantee: at or above ‖W‖_{2→1}; see the module's text.

    Edge cases: those of `inf_to_2_up`.

    Example:
        >>> round(two_to_1_up(np.array([[3.0], [4.0]]), flops=1e6), 9)
        7.0
    """
    return inf_to_2_up(np.asarray(W).T, flops=flops)


def inf_to_1_up(W: FloatArray, *, flops: float) -> float:
    """Upper bound on the largest ‖Wx‖₁ over |x_j| ≤ 1.

    Args:
        W: float64, shape (m, n).
        flops: floating-point operations to spend; too few give the entrywise bound.

    Returns:
        The bound, rounded up; never above Σ|W_ij|.

    Raises:
        ValueError: if W is empty, not 2-D, or holds NaN or infinity.

    Guarantee: at or above ‖W‖_{∞→1}; see the module's text.

    Edge cases: those of `inf_to_2_up`.

    Example:
        >>> round(inf_to_1_up(np.array([[1.0, 1.0], [1.0, -1.0]]), flops=1e6), 9)  # the truth is 2, Σ|W| is 4
        2.828427125
    """
    entrywise = matrix_sums(W).total_l1
    A, scale = _nonzero_part(W)
    if A.size == 0:
        return 0.0
    smaller, larger = sorted(A.shape)
    rank = _rank(A.shape[0] + A.shape[1])
    steps = _affordable(flops, fixed=_certificate_flops(smaller, larger), per_step=4.0 * rank * A.size)
    if steps is None:
        return entrywise
    V, e = _directions(A.shape[1], rank), np.ones(A.shape[0])
    d = np.ones(A.shape[1])
    previous = V
    for step in range(steps + 1):
        U, e = _unit_rows(A @ V)
        turned, d = _unit_rows(A.T @ U)
        V = turned if step == steps else turned + (step / (step + 3.0)) * (turned - previous)
        previous = turned
    r, c = _scales(e), _scales(d)
    around = mul_up(_length_of_inverse(r), _length_of_inverse(c))
    value = mul_up(mul_up(around, _scaled_norm(A, r, c)), scale)
    return require_bound(min(value, entrywise), what="the ∞→1 norm")


def _nonzero_part(W: FloatArray) -> tuple[FloatArray, float]:
    """W without zero rows and columns, scaled to unit size, and the scale."""
    scaled, scale = scale_to_unit(np.asarray(W, dtype=np.float64))
    rows, columns = np.flatnonzero(scaled.any(axis=1)), np.flatnonzero(scaled.any(axis=0))
    kept = scaled if rows.size == W.shape[0] and columns.size == W.shape[1] else scaled[np.ix_(rows, columns)]
    return kept, scale


def _certificate_flops(smaller: int, larger: int) -> float:
    """Work of `largest_singular_value_up`: the Gram matrix, an eigenvalue, two factorisations; 1e5 for the calls."""
    return 2.0 * smaller * smaller * larger + 8.0 * float(smaller) ** 3 + 1e5


def _affordable(flops: float, *, fixed: float, per_step: float) -> int | None:
    if fixed + LEAST_STEPS * per_step > flops:
        return None
    return int(min(MAX_STEPS, (flops - fixed) // per_step))


def _rank(n: int) -> int:
    """Columns of V: with √(2n) of them no local optimum is worse than the best; more than 24 gain nothing measurable."""
    return min(n, max(8, math.isqrt(2 * n) + 1), 24)


def _directions(n: int, rank: int) -> FloatArray:
    """Fixed unit rows without visible pattern, the same on every machine up to roundoff."""
    angles = 7.1 * np.outer(np.arange(1.0, n + 1.0), 1.37 * math.sqrt(2.0) * np.arange(1.0, rank + 1.0) + 0.3)
    return _unit_rows(np.cos(angles))[0]


def _unit_rows(V: FloatArray) -> tuple[FloatArray, FloatArray]:
    lengths: FloatArray = np.sqrt(np.einsum("ij,ij->i", V, V))
    return V / np.maximum(lengths, 2.0**-300)[:, None], lengths


def _ascend(product: Callable[[FloatArray], FloatArray], V: FloatArray, *, num_steps: int) -> FloatArray:
    """D after `num_steps` steps of the power method with momentum and one without."""
    previous = V
    for step in range(num_steps):
        turned, _ = _unit_rows(product(V))
        V = turned + (step / (step + 3.0)) * (turned - previous)
        previous = turned
    return _unit_rows(product(previous))[1]


def _scales(d: FloatArray) -> FloatArray:
    """Scales c = 1/√d up to a common factor, between 1 and √(1/SPREAD); rounded, which changes nothing: these are used."""
    largest = float(d.max())
    if not math.isfinite(largest) or largest <= 0.0:
        return np.ones_like(d)
    scales: FloatArray = 1.0 / np.sqrt(np.maximum(d / largest, SPREAD))
    return scales


def _length_of_inverse(c: FloatArray) -> float:
    """‖1/c‖₂, rounded up: two roundings and a sum per term."""
    return sqrt_up(inflate(float(np.sum((1.0 / c) ** 2)), num_operations=c.size + 4))


def _scaled_norm(A: FloatArray, r: FloatArray, c: FloatArray) -> float:
    """‖diag(r)·A·diag(c)‖₂, rounded up."""
    scaled = (r[:, None] * A) * c
    frobenius = sqrt_up(inflate(float(np.sum(scaled * scaled)), num_operations=scaled.size + 2))
    return add_up(largest_singular_value_up(scaled), mul_up(gamma(3), frobenius), UNDERFLOW)
