"""The proof: for any multipliers, what a program's output can be per unit of its input.

With multipliers m > 0 of the constraints and w > 0 of the output, let
 F(x, z) = Σ_k Σ_o m_ko·(constraint ko) − Σ_o w_o·y_o²,   a quadratic form with blocks P (in z), H (z with x), O (in x).
Differences within the constraints make the first sum at most 0, so Σ w·y² ≤ −F. If P is positive definite, −F is at
most xᵀRx with R = HᵀP⁻¹H − O, whatever z is. Then
 one entry of x:  Σ w·y² ≤ R_cc·x_c²;   ‖x‖₂ ≤ 1:  ≤ λ_max(R);   |x_i| ≤ 1:  ≤ λ_max(D⁻¹RD⁻¹)·Σ D_ii² for any diagonal D,
and ‖y‖₁² ≤ (Σ 1/w)·Σ w·y², ‖y‖₂² = Σ y² for w = 1. One factorisation of P serves every entry of x.

Rounding: variables are scaled so that P has ones, up to a factor of 2, on its diagonal (by powers of two, so exactly).
The stored F is off by a matrix of 2-norm at most ε: rounding of every block by γ_n times Frobenius norms of its
factors. F + E ⪰ F − ε·I, so P − ε·I and R + ε·I take the place of P and R. That
P − ε·I ⪰ δ·I is proven by a Cholesky factorisation of P − (δ + ε + its own error)·I that runs to its end (see
`spectra.dense`). For any V, HᵀP⁻¹H = HᵀV + Vᵀr + rᵀP⁻¹r with r = H − P·V, and rᵀP⁻¹r ⪯ (‖r‖²/δ)·I.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy import linalg, sparse

from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, add_up, gamma, inflate, mul_up, sqrt_up
from sensitivity.semidefinite.lifting import DENSE_SPEED, Multipliers
from sensitivity.semidefinite.program import Matrix, Numbers, Program, adjoint
from sensitivity.spectra.dense import largest_singular_value_up

WIDENINGS = (2e-4, 2e-3, 1e-2, 5e-2, 0.3)  # multipliers are raised by these shares until P is positive definite
MAX_SIDE = 5000  # of P: 200 MB, held three times
HUGE = 1e80  # multipliers beyond this or below its inverse are not used
UNDERFLOW = 2.0**-400  # more than all products that underflow can add up to


@dataclass(frozen=True, kw_only=True)
class Response:
    """R for scaled inputs.

    Attributes:
        R: shape (…, n, n), or its diagonal, shape (n,).
        error: 2-norm of the exact R minus this one, at most, shape (…); per entry for a diagonal.
        scales: scaled x_i = scales_i·x_i.
    """

    R: Numbers
    error: FloatArray
    scales: FloatArray


def response_flops(program: Program) -> float:
    """Work of one attempt at a bound, as the nominal speed counts it."""
    n, N = float(program.num_in), float(sum(program.sizes[1:]))
    products: float = sum(_squares_flops(A) for terms in program.reads for A in terms.values())
    work: float = N * N * N / 3.0 + 4.0 * N * N * n + 2.0 * N * n * n + products
    return float(DENSE_SPEED * work + 1e5)


def _squares_flops(A: Matrix) -> float:
    """Work of AᵀA; entries of a sparse one cost about ten times as much."""
    if isinstance(A, np.ndarray):
        return 2.0 * float(A.shape[0]) * float(A.shape[1]) * float(A.shape[1])
    return 20.0 * float(np.sum(np.diff(A.indptr).astype(np.float64) ** 2))


def columns_up(program: Program, found: Multipliers, *, q: float) -> FloatArray | None:
    """Bounds on ‖y‖_q for every unit vector x.

    Args:
        program: the program.
        found: multipliers, found for p = 2.
        q: 1 or 2.

    Returns:
        Shape (num_in,), rounded up; None if no widening of the multipliers makes P positive definite.

    Guarantee: at or above the largest ‖y‖_q over the program for each unit vector; see the module's text.
    """
    if not _is_ordinary(found):
        return None
    for widening in WIDENINGS:
        response = _response(program, found, q=q, widening=widening, diagonal=True)
        if response is not None:
            factor = _output_factor(found, q=q)
            squares = np.maximum(response.R.real, 0.0) + response.error
            bounds: FloatArray = np.sqrt(squares * factor) * response.scales * (1.0 + 2.0**-48)
            return bounds
    return None


def norm_up(program: Program, found: Multipliers, *, p: float, q: float) -> float | None:
    """A bound on ‖y‖_q over ‖x‖_p ≤ 1.

    Args:
        program: the program. Its matrices may be stacks, shape (count, rows, columns), for as many programs that share
            everything else, whose largest bound is meant.
        found: multipliers, found for the same p and q.
        p: 2 or infinity.
        q: 1 or 2.

    Returns:
        The bound, rounded up; None if no widening of the multipliers makes P positive definite.

    Guarantee: at or above the largest ‖y‖_q over the program; see the module's text. The multipliers are the same for
        all programs of a stack.
    """
    if not _is_ordinary(found):
        return None
    for widening in WIDENINGS:
        response = _response(program, found, q=q, widening=widening, diagonal=False)
        if response is not None:
            is_one, scales = response.R.ndim == 2, response.scales
            raised, left = (response.R, float(response.error)) if is_one else (_raised(response), 0.0)
            square = add_up(largest_singular_value_up(raised), left)
            size = float(scales.max()) ** 2 if p == 2.0 else float(np.sum(scales**2))
            around = mul_up(inflate(size, num_operations=scales.size + 4), _output_factor(found, q=q))
            return sqrt_up(mul_up(square, around))
    return None


def _raised(response: Response) -> Numbers:
    """R + error·I, each error put on its own matrix, so that a large one of a stack costs no other."""
    side, raised = np.arange(response.R.shape[-1]), response.R.copy()
    # raising the diagonal rounds it, by no more than this takes
    rounding = 4.0 * UNIT_ROUNDOFF * np.abs(raised[..., side, side]).max(axis=-1, initial=0.0)
    raised[..., side, side] += (response.error * (1.0 + 2.0**-40) + rounding)[..., None]
    return raised


def _is_ordinary(found: Multipliers) -> bool:
    """Whether products of multipliers, slopes and scales stay far from the ends of float64."""
    numbers = np.concatenate([np.full(1, found.value), found.source, found.output, *found.knots])
    return bool((numbers > 1.0 / HUGE).all() and (numbers < HUGE).all())


def _output_factor(found: Multipliers, *, q: float) -> float:
    """Σ 1/w for q = 1, rounded up; 1 for q = 2, where every w is 1."""
    if q == 2.0:
        return 1.0
    return inflate(float(np.sum(1.0 / found.output)), num_operations=found.output.size + 4)


def _response(program: Program, found: Multipliers, *, q: float, widening: float, diagonal: bool) -> Response | None:
    form = _Assembly(program, found, q=q, widening=widening, diagonal=diagonal)
    P, H, N, epsilon = form.P, form.H, form.P.shape[-1], form.total_error()
    if N == 0:
        return Response(R=-form.O, error=epsilon + np.zeros(program.num_in if diagonal else ()), scales=form.scales)
    trace = np.abs(np.diagonal(P, axis1=-2, axis2=-1)).sum(axis=-1) * (1.0 + gamma(N + 2))
    factor_error = 1.001 * form.gamma(N + 3) * (trace + 1.0)
    shift = 2.0 * (epsilon + factor_error)
    delta = (shift - epsilon - factor_error - 4.0 * UNIT_ROUNDOFF * (trace + shift)) * (1.0 - 2.0**-40)
    if not bool(((delta > 0.0) & (delta < 0.1)).all()):
        return None
    shifted, entries = P.copy(), np.arange(N)
    shifted[..., entries, entries] -= shift[..., None]
    V = _solved(shifted, H)
    del shifted
    if V is None or not bool(np.isfinite(V).all()):
        return None
    r = H - P @ V
    h, v, rest = _column_lengths(H), _column_lengths(V), _column_lengths(r)
    size = _frobenius(P)
    if diagonal:
        R = np.einsum("ij,ij->j", H, V) + np.einsum("ij,ij->j", V, r) - form.O
    else:
        R = adjoint(H) @ V + adjoint(V) @ r - form.O
        R = np.asarray((R + adjoint(R)) / 2.0)
        h, v, rest = (np.linalg.norm(lengths, axis=-1) for lengths in (h, v, rest))
    most = form.gamma(N + 8)
    unseen = most * (h + size * v)  # rounding of r
    left = rest + unseen + epsilon * v  # length of H − (P − ε·I)·V
    error = epsilon * (1.0 + v * v) + left * left / delta + v * unseen + most * (h * v + v * rest)
    magnitude = np.abs(R) if diagonal else _frobenius(R)
    error = (error + 64.0 * UNIT_ROUNDOFF * (magnitude + h * v + np.abs(form.O).max(initial=0.0) * R.shape[-1])) * (
        1.0 + 2.0**-20
    )
    return Response(R=R, error=error, scales=form.scales)


def _solved(A: Numbers, B: Numbers) -> Numbers | None:
    """About A⁻¹B, once a Cholesky factorisation of A (of every one of a stack) has run to its end; else None."""
    try:
        if A.ndim == 2:
            factor = linalg.cholesky(A, lower=True, overwrite_a=True, check_finite=False)
            return cast(Numbers, linalg.cho_solve((factor, True), B, check_finite=False))
        np.linalg.cholesky(A)
        return cast(Numbers, np.linalg.solve(A, B))
    except np.linalg.LinAlgError:
        return None


def _column_lengths(A: Numbers) -> FloatArray:
    """Euclidean length of every column, rounded up."""
    lengths: FloatArray = np.linalg.norm(A, axis=-2) * (1.0 + 2.0**-20)
    return lengths


class _Assembly:
    """F in scaled variables, with a running bound on its error, for one program or a stack of them.

    Attributes:
        P: its part in z, shape (…, N, N).
        H: its part between z and x, shape (…, N, n).
        O: its part in x, shape (…, n, n), or its diagonal.
        error: shape (…), as all that adds to it.
        scales: scaled x_i = scales_i·x_i.
    """

    def __init__(self, program: Program, found: Multipliers, *, q: float, widening: float, diagonal: bool) -> None:
        sizes = program.sizes
        starts = np.concatenate([[0], np.cumsum(sizes[1:])]).astype(int)
        self.places = [slice(0, 0)] + [slice(int(a), int(b)) for a, b in itertools.pairwise(starts)]
        matrices = [A for terms in program.reads for A in terms.values()]
        self.is_complex = any(np.iscomplexobj(A) for A in matrices)
        stack = matrices[0].shape[:-2]
        n, N = sizes[0], int(starts[-1])
        self.P, self.H = _zeros((*stack, N, N), self.is_complex), _zeros((*stack, N, n), self.is_complex)
        self.O = _zeros((n,) if diagonal else (*stack, n, n), self.is_complex)
        self.has_diagonal = diagonal
        self.error: FloatArray = np.full(stack, UNDERFLOW)
        self.added: FloatArray = np.zeros(stack)
        self.num_added = 0
        forms = [
            constraint.form(weights * (1.0 + widening))
            for constraint, weights in zip(program.constraints, found.knots, strict=True)
        ]
        # About the size of the answer, so that H and P are of one size; any positive scales are right.
        size = float(np.sum(found.source)) if bool(np.ptp(found.source) > 0.0) else float(found.source[0])
        ratio = found.value**2 / _output_factor(found, q=q) / size
        self.scales: FloatArray = np.sqrt(np.broadcast_to(found.source, (n,))) * 2.0 ** round(0.5 * math.log2(ratio))
        self.factors = [1.0 / self.scales] + [2.0 ** -np.round(0.5 * np.log2(form.own)) for form in forms]
        for k, form in enumerate(forms, start=1):
            own = form.own * self.factors[k] ** 2
            diagonal_entries = np.arange(starts[k - 1], starts[k])
            self.P[..., diagonal_entries, diagonal_entries] += own
            self.added = self.added + 2.0 * float(own.max(initial=0.0))
            if form.cross is not None:
                self._cross(program, k, form.cross, form.C)
            for B, weights in form.products:
                self._squares(program, k - 1, B, np.maximum(weights, 0.0), sign=1.0)
                self._squares(program, k - 1, B, np.maximum(-weights, 0.0), sign=-1.0)
        self._squares(program, len(forms), None, found.output, sign=-1.0)

    def total_error(self) -> FloatArray:
        """Bound on the 2-norm of the exact form minus the stored one."""
        return np.asarray(self.error + 4.0 * UNIT_ROUNDOFF * (self.num_added + 2) * self.added) * (1.0 + 2.0**-30)

    def gamma(self, num_operations: int) -> float:
        """γ_n, or 4·γ_{n+2} and more for complex numbers."""
        return 4.0 * gamma(num_operations + 4) if self.is_complex else gamma(num_operations)

    def _cross(self, program: Program, k: int, weights: FloatArray, C: sparse.csr_array | None) -> None:
        """Weights·z_k·(C·A_ki·z_i), in both triangles."""
        outer = weights * self.factors[k]
        for i, A in program.reads[k - 1].items():
            moved, off = self._through(C, A, program.errors.get((k - 1, i), 0.0))
            X = _scaled(outer, moved, self.factors[i])
            reach = float(np.abs(outer).max(initial=0.0)) * float(self.factors[i].max(initial=0.0))
            self.error = self.error + 2.0 * (32.0 * UNIT_ROUNDOFF * _frobenius(X) + reach * off * 1.01)
            self._add(k, i, X if isinstance(X, np.ndarray) else X.toarray())

    def _through(self, B: sparse.csr_array | None, A: Matrix, off: float) -> tuple[Matrix, FloatArray | float]:
        """B·A and its error in Frobenius norm, that of A being `off`."""
        if B is None:
            return A, off
        size = _frobenius(B)
        rounding = self.gamma(int(np.diff(B.indptr).max(initial=0)) + 2) * size * _frobenius(A)
        product: Matrix = np.asarray(B @ A) if isinstance(A, np.ndarray) else sparse.csr_array(B @ A)
        return product, 1.01 * (size * off + rounding)

    def _squares(
        self, program: Program, k: int, B: sparse.csr_array | None, weights: FloatArray, *, sign: float
    ) -> None:
        """± Σ weights·(B·Σ_i A_ki·z_i)²."""
        if not bool(weights.any()):
            return
        roots = np.sqrt(weights)
        made: dict[int, Matrix] = {}
        sizes, offs = np.zeros(self.error.shape), np.zeros(self.error.shape)
        for i, A in program.reads[k].items():
            moved, off = self._through(B, A, program.errors.get((k, i), 0.0))
            made[i] = _scaled(roots, moved, self.factors[i])
            size = _frobenius(made[i])
            reach = float(roots.max()) * float(self.factors[i].max(initial=0.0))
            sizes, offs = sizes + size, offs + 32.0 * UNIT_ROUNDOFF * size + reach * off * 1.01
        self.error = self.error + (self.gamma(weights.size + 4) * sizes * sizes + 2.0 * offs * sizes + offs * offs)
        for i, G in made.items():
            for j, other in made.items():
                if j > i:
                    continue
                if i == 0 and self.has_diagonal:
                    squares = _column_squares(G)
                    self.O += sign * squares
                    self.added, self.num_added = self.added + 2.0 * float(squares.max()), self.num_added + 1
                else:
                    self._add(i, j, sign * _gram(G, other, same=i == j), twice=False)

    def _add(self, i: int, j: int, block: Numbers, *, twice: bool = True) -> None:
        """Add a block at (i, j) and its transpose at (j, i); a product with itself is there once."""
        self.added, self.num_added = self.added + 2.0 * _frobenius(block), self.num_added + 1
        if i == 0 and j == 0:
            self.O += block
        elif j == 0:
            self.H[..., self.places[i], :] += block
        else:
            self.P[..., self.places[i], self.places[j]] += block
            if i != j or twice:
                self.P[..., self.places[j], self.places[i]] += adjoint(block)


def _zeros(shape: tuple[int, ...], is_complex: bool) -> Numbers:
    return np.zeros(shape, np.complex128) if is_complex else np.zeros(shape)


def _gram(G: Matrix, other: Matrix, *, same: bool) -> Numbers:
    """G*·other, exactly Hermitian where both are the same."""
    if isinstance(G, np.ndarray):
        product: Numbers = adjoint(G) @ (other if isinstance(other, np.ndarray) else other.toarray())
    else:
        found = G.T @ other
        product = found if isinstance(found, np.ndarray) else found.toarray()
    if same:
        product = (product + adjoint(product)) / 2.0
    return product


def _column_squares(G: Matrix) -> FloatArray:
    """Sums of squares of every column."""
    if isinstance(G, np.ndarray):
        squares: FloatArray = np.einsum("ij,ij->j", G, G)
        return squares
    return np.bincount(G.indices, weights=G.data * G.data, minlength=G.shape[1]).astype(np.float64)


def _scaled(rows: FloatArray, A: Matrix, columns: FloatArray) -> Matrix:
    """diag(rows)·A·diag(columns)."""
    if isinstance(A, np.ndarray):
        dense: Numbers = (rows[:, None] * A) * columns
        return dense
    made = sparse.csr_array(A, copy=True)
    made.data = made.data * np.repeat(rows, np.diff(made.indptr)) * columns[made.indices]
    return made


def _frobenius(A: Matrix) -> FloatArray:
    """Frobenius norm, rounded up; one per matrix of a stack."""
    norms = np.linalg.norm(A, axis=(-2, -1)) if isinstance(A, np.ndarray) else np.linalg.norm(A.data)
    return np.asarray(norms * (1.0 + 2.0**-20))
