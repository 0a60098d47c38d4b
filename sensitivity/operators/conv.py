"""Norm tables of zero-padded convolutions, borders, stride, dilation and groups included, without building the matrix.

Letters: W (c_out, c_in/groups, k_1, k_2) the kernel; output i reads input i·stride + a·dilation − padding through tap
a, per axis. Distinct taps of one output read distinct pixels, so every matrix entry is one kernel entry. The row sum
at output (i, j) is therefore Σ_ab |W_ab|^r·V_1[i,a]·V_2[j,b] with V[i,a] = 1 where the tap hits a real pixel, and the
column sum follows in the same way: exact with borders, and separable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sensitivity.norms import NormTable
from sensitivity.operators.linear import MatrixSums, table_from_sums
from sensitivity.rounding import FloatArray, inflate, mul_up, scale_to_unit, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up
from sensitivity.spectra.symbol import symbol_bound

IntArray = NDArray[np.int64]
MAX_HITS = 2**26  # entries of an (outputs × taps) table along one axis: 512 MiB


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """Shape facts of a 2-D convolution; a 1-D one has an axis of size 1 in front.

    Attributes:
        size_in: pixels per axis of the input.
        size_out: pixels per axis of the output.
        stride: per axis.
        padding: zeros added on both sides, per axis.
        dilation: per axis.
        groups: number of channel groups.
    """

    size_in: tuple[int, int]
    size_out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def conv_table(W: FloatArray, *, geometry: ConvGeometry, dense_entries: int, symbol_flops: float) -> NormTable:
    """Norm table of a convolution.

    Args:
        W: float64 kernel, shape (c_out, c_in/groups, k_1, k_2).
        geometry: sizes, stride, padding, dilation and groups.
        dense_entries: build one group's matrix and take its singular value if it has at most this many entries.
        symbol_flops: floating-point operations to spend on the symbol bound of 2→2.

    Returns:
        The table: 1→q and p→∞ exact up to rounding, 2→2 a certified upper bound, the rest upper bounds.

    Raises:
        ValueError: if W holds NaN or infinity.

    Guarantee: every entry is at or above the norm of the zero-padded operator on this input size.
    """
    W = reached_taps(W, geometry=geometry)
    per_group = np.split(W, geometry.groups, axis=0)
    spectral = max(_spectral_bound(kernel, geometry, dense_entries, symbol_flops) for kernel in per_group)
    return table_from_sums(conv_sums(W, geometry=geometry), spectral=spectral)


def conv_sums(W: FloatArray, *, geometry: ConvGeometry) -> MatrixSums:
    """Row and column sums of the unrolled convolution, rounded up.

    Args:
        W: float64 kernel, shape (c_out, c_in/groups, k_1, k_2).
        geometry: sizes, stride, padding, dilation and groups.

    Returns:
        The sums over the whole operator, all groups together.

    Raises:
        ValueError: if W holds NaN or infinity.
    """
    scaled, scale = scale_to_unit(reached_taps(W, geometry=geometry))
    A = np.abs(scaled)
    c_out, c_in_group, *taps = A.shape
    rows_1, rows_2 = (_taps_by_output(geometry, axis, taps[axis]) for axis in (0, 1))
    columns_1, columns_2 = (_taps_by_input(geometry, axis, taps[axis]) for axis in (0, 1))
    by_group = A.reshape(geometry.groups, c_out // geometry.groups, c_in_group, *taps)
    num_terms_row = c_in_group * math.prod(taps) + 4
    num_terms_column = (c_out // geometry.groups) * math.prod(taps) + 4
    num_rows = c_out * math.prod(geometry.size_out)
    num_columns = c_in_group * geometry.groups * math.prod(geometry.size_in)
    row_l1 = rows_1 @ A.sum(axis=1) @ rows_2.T
    row_squares = rows_1 @ (A * A).sum(axis=1) @ rows_2.T
    column_l1 = columns_1 @ by_group.sum(axis=1) @ columns_2.T
    column_squares = columns_1 @ (by_group * by_group).sum(axis=1) @ columns_2.T

    def up(value: float, num_operations: int) -> float:
        return mul_up(inflate(value, num_operations=num_operations), scale)

    return MatrixSums(
        num_in=num_columns,
        num_out=num_rows,
        largest_entry=mul_up(float(A.max()), scale),
        column_l1=up(float(column_l1.max()), num_terms_column),
        column_l2=up(sqrt_up(float(column_squares.max())), num_terms_column),
        row_l1=up(float(row_l1.max()), num_terms_row),
        row_l2=up(sqrt_up(float(row_squares.max())), num_terms_row),
        columns_l1_l2=up(sqrt_up(float(np.sum(column_l1**2))), num_terms_column + num_columns),
        rows_l1_l2=up(sqrt_up(float(np.sum(row_l1**2))), num_terms_row + num_rows),
        total_l1=up(float(row_l1.sum()), num_terms_row + num_rows),
    )


def reached_taps(W: FloatArray, *, geometry: ConvGeometry) -> FloatArray:
    """The kernel with 0 at taps that touch padding alone: they are no part of the operator, however large.

    Args:
        W: float64 kernel, shape (…, k_1, k_2).
        geometry: sizes, stride, padding and dilation.

    Returns:
        A kernel of the same shape with the same operator.
    """
    reached_1, reached_2 = (_taps_by_output(geometry, axis, W.shape[2 + axis]).max(axis=0) for axis in (0, 1))
    kept: FloatArray = np.where(np.outer(reached_1, reached_2) > 0.0, W, 0.0)
    return kept


def unrolled_matrix(kernel: FloatArray, *, geometry: ConvGeometry) -> FloatArray:
    """Dense matrix of one group of a convolution, rows (channel, i, j) and columns (channel, u, v).

    Args:
        kernel: float64, shape (c_out/groups, c_in/groups, k_1, k_2).
        geometry: sizes, stride, padding and dilation.

    Returns:
        The matrix, exact: every entry is a kernel entry or 0.
    """
    c_out, c_in, *taps = kernel.shape
    full = np.zeros((c_out, *geometry.size_out, c_in, *geometry.size_in))  # (o, i, j, c, u, v)
    pixels = [_pixels_read(geometry, axis, taps[axis]) for axis in (0, 1)]
    for a, b in np.ndindex(*taps):
        (i, u), (j, v) = pixels[0][a], pixels[1][b]
        full[:, i[:, None], j, :, u[:, None], v] = kernel[:, :, a, b]
    return full.reshape(c_out * math.prod(geometry.size_out), c_in * math.prod(geometry.size_in))


def _spectral_bound(kernel: FloatArray, geometry: ConvGeometry, dense_entries: int, symbol_flops: float) -> float:
    c_out, c_in = kernel.shape[:2]
    entries = c_out * math.prod(geometry.size_out) * c_in * math.prod(geometry.size_in)
    if entries <= dense_entries:
        return largest_singular_value_up(unrolled_matrix(kernel, geometry=geometry))
    return symbol_bound(
        kernel, stride=geometry.stride, dilation=geometry.dilation, flops=symbol_flops / geometry.groups
    )


def _pixels_read(geometry: ConvGeometry, axis: int, num_taps: int) -> list[tuple[IntArray, IntArray]]:
    """For each tap, the outputs that read a real pixel through it, and these pixels."""
    outputs = np.arange(geometry.size_out[axis])
    found = []
    for a in range(num_taps):
        pixels = outputs * geometry.stride[axis] + a * geometry.dilation[axis] - geometry.padding[axis]
        real = (pixels >= 0) & (pixels < geometry.size_in[axis])
        found.append((outputs[real], pixels[real]))
    return found


def _taps_by_output(geometry: ConvGeometry, axis: int, num_taps: int) -> FloatArray:
    """V[i, a] = 1 where tap a of output i hits a real pixel; one row per output."""
    hits = _empty_hits(geometry.size_out[axis], num_taps)
    for a, (outputs, _) in enumerate(_pixels_read(geometry, axis, num_taps)):
        hits[outputs, a] = 1.0
    return hits


def _taps_by_input(geometry: ConvGeometry, axis: int, num_taps: int) -> FloatArray:
    """V[u, a] = 1 where some output reads pixel u through tap a."""
    hits = _empty_hits(geometry.size_in[axis], num_taps)
    for a, (_, pixels) in enumerate(_pixels_read(geometry, axis, num_taps)):
        hits[pixels, a] = 1.0
    return hits


def _empty_hits(size: int, num_taps: int) -> FloatArray:
    if size * num_taps > MAX_HITS:
        raise ValueError(
            f"{num_taps} taps on {size} pixels are more than fit into memory here; use a smaller kernel or input"
        )
    return np.zeros((size, num_taps))
