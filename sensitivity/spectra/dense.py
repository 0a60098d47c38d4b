"""Largest singular values with a certificate: an eigenvalue routine guesses, a Cholesky factorisation proves.

For A (m×n, the smaller side k) and G = fl(A·Aᵀ or Aᵀ·A), scaled so that entries are at most 1:
 |G − exact Gram| ≤ γ_m'·|A||A|ᵀ entrywise, so its 2-norm is at most γ_m'·‖A‖_F²            (Higham 2002, eq. 3.13);
 if Cholesky of M = fl(t·I − G) runs to its end, RᵀR = M + E with |E| ≤ γ_{k+1}|Rᵀ||R|, so λ_min(M) ≥
 −γ_{k+1}/(1−γ_{k+1})·trace(M)
                                                                                             (Higham 2002, Thm 10.3;
                                                                                             Rump 2006, §2);
hence λ_max(exact Gram) ≤ t + γ_{k+1}/(1−γ_{k+1})·trace(M) + u·(t + max G_ii) + γ_m'·‖A‖_F².
(The code takes k + 3 for k + 1, which covers kernels that multiply by reciprocals of pivots.)
Complex arithmetic obeys the same bounds with every γ_n replaced by 4·γ_{n+2} (Higham 2002, Lemma 3.5).
Matrix products are taken to be conventional, every entry a sum of products; Strassen's would break the first line.
No number here comes from power iteration: a guess that is too small fails the factorisation and is raised.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, eigsh

from sensitivity.rounding import UNIT_ROUNDOFF, add_up, gamma, inflate, mul_up, require_bound, sqrt_up

LANCZOS_SIDE = 96
NUM_CANDIDATES = 16
PIECE_NUMBERS = 4_000_000  # of a stack at a time, so that its products take little memory
Stack = NDArray[np.float64] | NDArray[np.complex128]


def largest_singular_value_up(stack: Stack) -> float:
    """Upper bound on the largest singular value over a stack of matrices.

    Args:
        stack: shape (..., m, n), float64 or complex128.

    Returns:
        A number at or above every singular value of every matrix, above the largest by about k²·2⁻⁵³ in relative
        terms, k = min(m, n).

    Raises:
        ValueError: if an entry is NaN or infinite.

    Guarantee: proven by a Cholesky factorisation, rounding included; see the module's text.

    Edge cases: an empty or a zero stack gives 0.0.

    Source: S. M. Rump (2006), Verification of positive definiteness, BIT 46.

    Example:
        >>> value = largest_singular_value_up(np.diag([3.0, 4.0]))
        >>> 4.0 <= value < 4.0 + 1e-12
        True
    """
    largest = float(np.max(np.abs(stack), initial=0.0))  # NaN and infinity come through
    if not math.isfinite(largest):
        raise ValueError("a matrix holds NaN or infinity: it has no singular values; train again or clip the weights")
    if largest == 0.0:
        return 0.0
    scale = math.ldexp(1.0, min(max(math.frexp(largest)[1], -1000), 1000))
    matrices = (stack / scale).reshape(-1, *stack.shape[-2:])
    if matrices.shape[1] > matrices.shape[2]:
        matrices = np.swapaxes(matrices, 1, 2)
    piece = max(PIECE_NUMBERS // max(matrices.shape[1] * matrices.shape[2], 1), 1)
    pieces = (matrices[start : start + piece] for start in range(0, len(matrices), piece))
    value = sqrt_up(max(_largest_gram_eigenvalue_up(part) for part in pieces))
    return require_bound(mul_up(value, scale), what="largest singular value")


def _largest_gram_eigenvalue_up(matrices: Stack) -> float:
    """λ_max of A·A* over a stack of matrices with at least as many columns as rows."""
    side, length = matrices.shape[1:]
    complex_factor = 4.0 if np.iscomplexobj(matrices) else 1.0
    frobenius_squared = inflate(
        float(np.max(np.einsum("nij,nij->n", matrices, np.conj(matrices)).real)), num_operations=side * length + 8
    )
    gram = _gram(matrices[0])[None] if len(matrices) == 1 else _gram(matrices)
    gram_error = mul_up(complex_factor * gamma(length + 2), frobenius_squared)
    return largest_eigenvalue_up(gram, error=gram_error, trace=frobenius_squared)


def largest_eigenvalue_up(gram: Stack, *, error: float, trace: float) -> float:
    """Upper bound on the largest eigenvalue of positive semidefinite matrices that are known up to an error.

    Args:
        gram: float64 or complex128, shape (count, side, side), Hermitian (of the factorisation's triangle, at least),
            finite, entries of the order of 1 or smaller.
        error: bound on the 2-norm of each exact matrix minus the given one.
        trace: bound on the trace, and so on every diagonal entry, of each given matrix.

    Returns:
        A number at or above every eigenvalue of every exact matrix.

    Raises:
        ValueError: if no factorisation succeeds.

    Guarantee: proven by a Cholesky factorisation; see the module's text.
    """
    side = gram.shape[-1]
    complex_factor = 4.0 if np.iscomplexobj(gram) else 1.0
    least_step = max(8.0 * complex_factor * (side + 2) ** 2 * UNIT_ROUNDOFF * trace / side, 2.0**-900)
    for guess_of in (_quick_guess, _full_guess):
        guess, step = max(guess_of(gram), 0.0), least_step
        for _ in range(8 if guess_of is _quick_guess else 200):
            threshold = guess + step
            if _is_positive_definite(threshold, gram):
                factor_error = mul_up(complex_factor * gamma(side + 3) * 1.001, mul_up(float(side), threshold))
                shift_error = mul_up(2.0 * UNIT_ROUNDOFF, add_up(threshold, trace))
                return add_up(threshold, factor_error, shift_error, error)
            step *= 2.0
    raise ValueError(f"a matrix of side {side} defeated its own certificate: no proven norm; look for extreme weights")


def _gram(matrices: Stack) -> Stack:
    adjoint = np.swapaxes(matrices, -1, -2)
    return matrices @ (np.conj(adjoint) if np.iscomplexobj(matrices) else adjoint)


def _quick_guess(gram: Stack) -> float:
    """A guess at the largest eigenvalue over the stack; never trusted, only tried."""
    count, side = gram.shape[:2]
    if count == 1 and side > LANCZOS_SIDE:
        start = np.cos(np.arange(side, dtype=np.float64))
        try:
            return float(eigsh(gram[0], k=1, which="LA", v0=start, tol=0.0, return_eigenvectors=False)[0])
        except ArpackError:
            return _full_guess(gram)
    if count > 2 * NUM_CANDIDATES:
        sizes = np.sqrt(np.sum(np.abs(gram) ** 2, axis=(1, 2)))
        squares = gram @ gram
        lower_bounds = np.sqrt(np.sum(np.abs(squares) ** 2, axis=(1, 2))) / np.maximum(sizes, 2.0**-900)
        return _full_guess(gram[np.argsort(lower_bounds)[-NUM_CANDIDATES:]])
    return _full_guess(gram)


def _full_guess(gram: Stack) -> float:
    return float(np.linalg.eigvalsh(gram)[:, -1].max())


def _is_positive_definite(threshold: float, gram: Stack) -> bool:
    shifted, diagonal = -gram, np.arange(gram.shape[-1])
    shifted[..., diagonal, diagonal] += threshold
    try:
        np.linalg.cholesky(shifted)
    except np.linalg.LinAlgError:
        return False
    return True
