"""The 2→2 norm of a convolution through its symbol or its patches, certified upper bounds for zero padding.

A zero-padded convolution is a corner of the convolution on the infinite grid, so its norm is at most that of the
infinite one, which is sup_θ ‖Ŵ(θ)‖ with Ŵ(θ) = Σ_a W_a·e^{i⟨a,θ⟩}.
Dilation D with stride s, per axis, g = gcd(s, D): only inputs of one class modulo g are read, which leaves stride s/g
and dilation D/g; these are coprime, so outputs of different classes modulo D/g read disjoint inputs, and the operator
is block diagonal with blocks of stride s/g and dilation 1. Stride s: input phase σ sees the kernel W[s·b + σ], so a
strided convolution is a plain one of c_in·s channels and ⌈k/s⌉ taps.
Grid: for unit u, v the function u*Ŵ(θ)v has frequencies 0..m−1 per axis. With φ = θ/2 and a phase factor it is a
trigonometric polynomial of degree m−1 in φ, whose modulus on 2N equispaced φ repeats that on N equispaced θ, so by
Ehlich and Zeller (1964) sup ≤ max over the grid / cos(π(m−1)/(2N)); once per axis. (This needs no rounding of even m
to m+1.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, add_up, div_up, mul_up, scale_to_unit, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up

MAX_GRID = 64


def symbol_bound(
    kernel: FloatArray, *, stride: tuple[int, ...], dilation: tuple[int, ...], flops: float = 2e8
) -> float:
    """Upper bound on the 2→2 norm of a zero-padded convolution of any input size.

    Args:
        kernel: float64, shape (c_out, c_in, k_1, …), one group, one to three axes.
        stride: per axis.
        dilation: per axis.
        flops: floating-point operations to spend; more gives a finer grid and a tighter bound.

    Returns:
        The bound, rounded up.

    Raises:
        ValueError: if the kernel holds NaN or infinity.

    Guarantee: at or above the largest singular value of the operator for every input size and zero padding.

    Edge cases: a zero kernel gives 0.0.

    Source: H. Ehlich, K. Zeller (1964), Schwankung von Polynomen zwischen Gitterpunkten, Math. Z. 86.

    Example:
        >>> ones = np.ones((1, 1, 1, 3))
        >>> 2.998 < symbol_bound(ones, stride=(1, 2), dilation=(1, 2)) < 3.01
        True
    """
    scaled, scale = scale_to_unit(kernel)
    if not scaled.any():
        return 0.0
    steps = [s // math.gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
    phases = polyphase(scaled, steps=tuple(steps))
    c_out, c_in, *taps = phases.shape
    grid = grid_sizes(tuple(taps), sides=(c_out, c_in), flops=flops)
    symbols, rounding = _symbols(phases, grid)
    bound = add_up(largest_singular_value_up(symbols), rounding)
    for num_taps, points in zip(taps, grid, strict=True):
        bound = mul_up(bound, _grid_factor(num_taps, points))
    return mul_up(bound, scale)


def patch_bound(kernel: FloatArray, *, stride: tuple[int, ...], dilation: tuple[int, ...]) -> float:
    """Cheap upper bound on the 2→2 norm of a zero-padded convolution of any input size, up to √(taps) too large.

    Args:
        kernel: float64, shape (c_out, c_in, k_1, …), one group, one to three axes.
        stride: per axis.
        dilation: per axis.

    Returns:
        The bound, rounded up.

    Raises:
        ValueError: if the kernel holds NaN or infinity.

    Guarantee: at or above the largest singular value of the operator for every input size and zero padding. With the
        stride resolved, every output multiplies a patch of m = Π⌈k/s⌉ pixels by one matrix M, and every pixel lies in
        m patches, so ‖Wx‖² ≤ ‖M‖²·m·‖x‖²; for Wᵀ the same holds with outputs and pixels exchanged. Equality is near
        for kernels that are alike in all taps.

    Edge cases: a zero kernel gives 0.0.

    Source: S. Singla, S. Feizi (2021), Fantastic four, ICLR, Theorem 1, for stride 1; the stride is added here.

    Example:
        >>> ones = np.ones((1, 1, 1, 3))
        >>> 3.0 <= patch_bound(ones, stride=(1, 1), dilation=(1, 1)) < 3.0 + 1e-12
        True
    """
    scaled, scale = scale_to_unit(kernel)
    steps = [s // math.gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
    phases = polyphase(scaled, steps=tuple(steps))
    if phases.shape[0] > phases.shape[1]:
        phases = np.swapaxes(phases, 0, 1)
    overlap = sqrt_up(float(math.prod(phases.shape[2:])))
    return mul_up(mul_up(largest_singular_value_up(phases.reshape(phases.shape[0], -1)), overlap), scale)


def least_symbol_flops(kernel: FloatArray, *, stride: tuple[int, ...], dilation: tuple[int, ...]) -> float:
    """Floating-point operations that `symbol_bound` takes on its coarsest grid, about."""
    steps = [s // math.gcd(s, d) for s, d in zip(stride, dilation, strict=True)]
    taps = [-(-k // s) for k, s in zip(kernel.shape[2:], steps, strict=True)]
    sides = (kernel.shape[0], kernel.shape[1] * math.prod(steps))
    return math.prod(grid_sizes(tuple(taps), sides=sides, flops=0.0)) * _one_matrix_flops(sides) / 2.0


def polyphase(kernel: FloatArray, *, steps: tuple[int, ...]) -> FloatArray:
    """Rewrite a strided kernel as an unstrided one of more input channels.

    Args:
        kernel: shape (c_out, c_in, k_1, …).
        steps: stride per axis.

    Returns:
        Shape (c_out, c_in·s_1·…, ⌈k_1/s_1⌉, …).

    Example:
        >>> polyphase(np.arange(3.0).reshape(1, 1, 1, 3), steps=(1, 2)).tolist()
        [[[[0.0, 2.0]], [[1.0, 0.0]]]]
    """
    c_out, c_in, *sizes = kernel.shape
    axes = len(sizes)
    taps = [-(-k // s) for k, s in zip(sizes, steps, strict=True)]
    room = [(0, m * s - k) for m, s, k in zip(taps, steps, sizes, strict=True)]
    padded = np.pad(kernel, [(0, 0), (0, 0), *room])
    split = padded.reshape(c_out, c_in, *(size for pair in zip(taps, steps, strict=True) for size in pair))
    phases_first = split.transpose(0, 1, *range(3, 3 + 2 * axes, 2), *range(2, 2 + 2 * axes, 2))
    return np.ascontiguousarray(phases_first).reshape(c_out, c_in * math.prod(steps), *taps)


def grid_sizes(taps: tuple[int, ...], *, sides: tuple[int, int], flops: float) -> tuple[int, ...]:
    """Grid points per axis: as many as the budget allows, up to 64, never fewer than 4 per tap gap.

    Args:
        taps: taps per axis after the stride is resolved.
        sides: output and input channels after the stride is resolved.
        flops: floating-point operations to spend.

    Returns:
        Grid sizes; an axis of one tap needs one point.
    """
    one_matrix = _one_matrix_flops(sides)
    least = [1 if m == 1 else 4 * (m - 1) for m in taps]
    size = MAX_GRID
    while size > 4:
        chosen = [1 if m == 1 else max(size, low) for m, low in zip(taps, least, strict=True)]
        if math.prod(chosen) * one_matrix <= 2.0 * flops:
            break
        size -= 4
    chosen = [1 if m == 1 else max(size, low) for m, low in zip(taps, least, strict=True)]
    return tuple(chosen)


def _one_matrix_flops(sides: tuple[int, int]) -> float:
    small, large = min(sides), max(sides)
    return 8.0 * small * small * large + 80.0 * small**3 + 4000.0


def _symbols(phases: FloatArray, grid: tuple[int, ...]) -> tuple[NDArray[np.complex128], float]:
    """Symbol matrices on half the grid (the rest is conjugate), and a bound on their rounding error in the 2-norm."""
    c_out, c_in, *taps = phases.shape
    axes = len(taps)
    symbols: NDArray[np.complex128] | FloatArray = phases
    for axis in range(axes):
        waves = _waves(grid[axis], taps[axis])
        if axis == 0:
            waves = waves[: grid[0] // 2 + 1]
        symbols = np.tensordot(symbols, waves, axes=(2, 1))  # (o, c, remaining taps, θ of the axes done)
    stack = np.ascontiguousarray(np.moveaxis(symbols, (0, 1), (-2, -1))).reshape(-1, c_out, c_in)
    sums = np.abs(phases).sum(axis=tuple(range(2, 2 + axes)))
    frobenius = sqrt_up(float(np.sum(sums * sums)))
    num_roundings = 40.0 * max(1, axes - 1) + 4.0 * sum(taps)
    return stack.astype(np.complex128, copy=False), mul_up(2.0 * num_roundings * UNIT_ROUNDOFF, 1.001 * frobenius)


def _waves(grid: int, num_taps: int) -> NDArray[np.complex128]:
    """exp(2πi·j·a/grid) within 24 units of roundoff: the turns are integers, the angle is rounded three times."""
    turns = np.outer(np.arange(grid), np.arange(num_taps)) % grid
    angles = turns * (2.0 * math.pi / grid)
    waves: NDArray[np.complex128] = np.cos(angles) + 1j * np.sin(angles)
    return waves


def _grid_factor(num_taps: int, grid: int) -> float:
    """1/cos(π(m−1)/(2N)), rounded up by more than the cosine's error."""
    if num_taps == 1:
        return 1.0
    cosine = math.cos(math.pi * (num_taps - 1) / (2 * grid))
    return div_up(1.0, cosine * (1.0 - 64.0 * UNIT_ROUNDOFF))
