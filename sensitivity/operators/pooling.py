"""Norm tables of pooling layers.

Average pooling is separable: the operator is A_1 ⊗ … ⊗ A_k on every channel, where A[i, u] is the weight of pixel u in
window i of one axis (every divisor rule of PyTorch factors over the axes). All norms of a Kronecker product that are
needed here are products; its entries are at least 0, so ∞→1, ∞→2 and 2→1 are exact too.
Max pooling: each output moves by at most the largest move in its window; with m the largest number of windows over one
pixel, p→p is m^{1/p}, 1→2 √m, p→∞ 1, ∞→q n_out^{1/q} and 2→1 at most √(m·n_out). Windows over a pixel are counted one
by one along each axis, and m is the product of the axes' largest counts, since windows are boxes of taps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sensitivity.norms import NormTable, between_dual_bounds, repeated_table, tighten
from sensitivity.operators.linear import MatrixSums, matrix_sums, table_from_sums
from sensitivity.rounding import FloatArray, inflate, mul_up, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up

IntArray = NDArray[np.int64]
DENSE_WEIGHTS = 1_000_000  # build the matrix of one axis if it has at most this many entries


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Averaging windows along one axis: output i is the sum of the pixels first[i] … last[i] − 1, over divisors[i].

    Attributes:
        first: first pixel of each window.
        last: one past its last pixel; at or below first for an empty window.
        divisors: positive integers.
        size_in: pixels of the axis.
    """

    first: IntArray
    last: IntArray
    divisors: IntArray
    size_in: int

    @property
    def weights(self) -> FloatArray:
        """1/divisor, correctly rounded."""
        weights: FloatArray = 1.0 / self.divisors.astype(np.float64)
        return weights

    def pattern(self) -> sparse.csr_array:
        """Ones where a window reads a pixel, shape (windows, pixels)."""
        lengths = np.maximum(self.last - self.first, 0)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        columns = np.arange(int(lengths.sum())) - starts + np.repeat(self.first, lengths)
        return sparse.csr_array((np.ones(rows.size), (rows, columns)), shape=(len(lengths), self.size_in))

    def dense(self) -> FloatArray:
        """The weights as a matrix, shape (windows, pixels)."""
        pixels = np.arange(self.size_in)
        inside = (pixels >= self.first[:, None]) & (pixels < self.last[:, None])
        weights: FloatArray = np.where(inside, self.weights[:, None], 0.0)
        return weights


def average_windows(
    size_in: int,
    size_out: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    count_include_pad: bool,
    divisor: int | None,
) -> Windows:
    """Windows of average pooling along one axis.

    Args:
        size_in: pixels of the input axis.
        size_out: windows along the axis.
        kernel: window length.
        stride: step between windows.
        padding: zeros added on both sides.
        count_include_pad: whether padding counts in the divisor (positions past the padded end never count).
        divisor: fixed divisor of this axis, or None.

    Returns:
        The windows.

    Source: PyTorch, aten/src/ATen/native/cpu/AvgPoolKernel.cpp (hstart, hend and pool_size).

    Example:
        >>> average_windows(4, 2, kernel=2, stride=2, padding=0, count_include_pad=True, divisor=None).dense()
        array([[0.5, 0.5, 0. , 0. ],
               [0. , 0. , 0.5, 0.5]])
    """
    start = np.arange(size_out) * stride - padding
    end = np.minimum(start + kernel, size_in + padding)
    first, last = np.maximum(start, 0), np.minimum(end, size_in)
    counted = end - start if count_include_pad else last - first
    divisors = np.maximum(counted, 1) if divisor is None else np.full(size_out, divisor)
    return Windows(first=first, last=last, divisors=divisors, size_in=size_in)


def adaptive_windows(size_in: int, size_out: int) -> Windows:
    """Windows of adaptive average pooling along one axis: window i is [⌊i·n/m⌋, ⌈(i+1)·n/m⌉).

    Example:
        >>> adaptive_windows(3, 2).dense()
        array([[0.5, 0.5, 0. ],
               [0. , 0.5, 0.5]])
    """
    i = np.arange(size_out)
    first, last = i * size_in // size_out, -(-(i + 1) * size_in // size_out)
    return Windows(first=first, last=last, divisors=last - first, size_in=size_in)


def average_table(*axes: Windows, channels: int) -> NormTable:
    """Norm table of A_1 ⊗ … ⊗ A_k applied to every channel, A_i the matrix of the windows of axis i.

    Args:
        axes: windows of each axis, in order; at least one.
        channels: number of channels.

    Returns:
        The table: exact up to rounding for axes of up to a million weights, and upper bounds from window lengths and
        overlaps for longer ones.

    Guarantee: every entry is at or above the true norm; one part in 2⁵⁰ per axis covers the rounded weights 1/divisor.

    Example:
        >>> halves = average_windows(4, 2, kernel=2, stride=2, padding=0, count_include_pad=True, divisor=None)
        >>> [round(average_table(halves, halves, channels=1)[i][i], 12) for i in range(3)]
        [0.25, 0.5, 1.0]
    """
    product, spectral = _axis_bounds(axes[0])
    for axis in axes[1:]:
        sums, own = _axis_bounds(axis)
        product, spectral = _kronecker(product, sums), _widened(spectral, own)
    return repeated_table(table_from_sums(product, spectral=_widened(spectral, 1.0)), copies=channels)


def _widened(a: float, b: float) -> float:
    return mul_up(mul_up(a, b), 1.0 + 2.0**-50)


def _kronecker(first: MatrixSums, second: MatrixSums) -> MatrixSums:
    """Row and column sums of a Kronecker product."""
    return MatrixSums(
        num_in=first.num_in * second.num_in,
        num_out=first.num_out * second.num_out,
        largest_entry=_widened(first.largest_entry, second.largest_entry),
        column_l1=_widened(first.column_l1, second.column_l1),
        column_l2=_widened(first.column_l2, second.column_l2),
        row_l1=_widened(first.row_l1, second.row_l1),
        row_l2=_widened(first.row_l2, second.row_l2),
        columns_l1_l2=_widened(first.columns_l1_l2, second.columns_l1_l2),
        rows_l1_l2=_widened(first.rows_l1_l2, second.rows_l1_l2),
        total_l1=_widened(first.total_l1, second.total_l1),
    )


def average_pool_matrix(*axes: Windows, channels: int) -> sparse.csr_array:
    """The matrix of average pooling on one record, channels first.

    Args:
        axes: windows of each axis.
        channels: number of channels.

    Returns:
        Weights 1/divisor, correctly rounded, shape (channels·outputs, channels·pixels).

    Example:
        >>> average_pool_matrix(adaptive_windows(3, 2), channels=1).toarray()
        array([[0.5, 0.5, 0. ],
               [0. , 0.5, 0.5]])
    """
    pattern, divisors = axes[0].pattern(), axes[0].divisors
    for axis in axes[1:]:
        pattern = sparse.csr_array(sparse.kron(pattern, axis.pattern(), format="csr"))
        divisors = np.kron(divisors, axis.divisors)  # integers, so each quotient is rounded once
    rows = np.repeat(np.arange(len(divisors)), np.diff(pattern.indptr))
    one = sparse.csr_array((pattern.data / divisors[rows], pattern.indices, pattern.indptr), shape=pattern.shape)
    return sparse.csr_array(sparse.kron(sparse.eye_array(channels), one, format="csr"))


def _axis_bounds(axis: Windows) -> tuple[MatrixSums, float]:
    """Row and column sums of one axis, and its largest singular value, each rounded up."""
    size_out = len(axis.first)
    if size_out * axis.size_in <= DENSE_WEIGHTS:
        A = axis.dense()
        return matrix_sums(A), largest_singular_value_up(A)
    lengths = np.maximum(axis.last - axis.first, 0)
    overlap = float(largest_overlap(axis))
    largest = float(axis.weights[lengths > 0].max(initial=0.0))
    # Products of a correctly rounded weight and an integer below 2^53: two roundings.
    row_l1 = inflate(float((axis.weights * lengths).max()), num_operations=2)
    row_l2 = inflate(float((axis.weights * np.sqrt(lengths)).max()), num_operations=3)
    column_l1, column_l2 = mul_up(overlap, largest), mul_up(sqrt_up(overlap), largest)
    sums = MatrixSums(
        num_in=axis.size_in,
        num_out=size_out,
        largest_entry=largest,
        column_l1=column_l1,
        column_l2=column_l2,
        row_l1=row_l1,
        row_l2=row_l2,
        columns_l1_l2=mul_up(sqrt_up(float(axis.size_in)), column_l1),
        rows_l1_l2=mul_up(sqrt_up(float(size_out)), row_l1),
        total_l1=mul_up(float(size_out), row_l1),
    )
    # Windows that do not overlap are orthogonal rows; else Schur's test.
    return sums, row_l2 if overlap <= 1.0 else between_dual_bounds(column_l1, row_l1)


def reduction_table(weight: float, *, num_reduced: int, num_out: int) -> NormTable:
    """Norm table of a sum over disjoint sets of `num_reduced` entries, each times `weight`.

    Example:
        >>> reduction_table(0.25, num_reduced=4, num_out=1)[1]
        (0.5, 0.5, 0.5)
    """
    root, many = sqrt_up(float(num_reduced)), float(num_reduced)
    two = mul_up(weight, root)
    one = mul_up(weight, many)
    outputs = float(num_out)
    sums = MatrixSums(
        num_in=num_reduced * num_out,
        num_out=num_out,
        largest_entry=weight,
        column_l1=weight,
        column_l2=weight,
        row_l1=one,
        row_l2=two,
        columns_l1_l2=mul_up(weight, sqrt_up(many * outputs)),
        rows_l1_l2=mul_up(one, sqrt_up(outputs)),
        total_l1=mul_up(one, outputs),
    )
    return table_from_sums(sums, spectral=two)


def windows_over_a_pixel(size_in: int, size_out: int, *, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Largest number of max-pooling windows along one axis that read the same pixel, counted one by one.

    Example:
        >>> windows_over_a_pixel(8, 6, kernel=2, stride=2, padding=0, dilation=2)
        2
    """
    counts = np.zeros(size_in, dtype=np.int64)
    starts = np.arange(size_out) * stride - padding
    for tap in range(kernel):  # one window reads a pixel through one tap at most, so no index repeats
        pixels = starts + dilation * tap
        counts[pixels[(pixels >= 0) & (pixels < size_in)]] += 1
    return int(counts.max())


def window_pattern(
    size_in: int, size_out: int, *, kernel: int, stride: int, padding: int, dilation: int
) -> sparse.csr_array:
    """Ones where a max-pooling window along one axis reads a real pixel, shape (windows, pixels).

    Example:
        >>> window_pattern(3, 2, kernel=2, stride=2, padding=1, dilation=1).toarray()
        array([[1., 0., 0.],
               [0., 1., 1.]])
    """
    pixels = (np.arange(size_out) * stride - padding)[:, None] + dilation * np.arange(kernel)
    rows, taps = np.nonzero((pixels >= 0) & (pixels < size_in))
    return sparse.csr_array((np.ones(rows.size), (rows, pixels[rows, taps])), shape=(size_out, size_in))


def reads_padding_alone(size_in: int, size_out: int, *, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether some max-pooling window along one axis reads no real pixel.

    Example:
        >>> reads_padding_alone(1, 1, kernel=2, stride=1, padding=1, dilation=2)
        True
        >>> reads_padding_alone(2, 3, kernel=2, stride=1, padding=1, dilation=1)
        False
    """
    pixels = (np.arange(size_out) * stride - padding)[:, None] + dilation * np.arange(kernel)
    return not bool(((pixels >= 0) & (pixels < size_in)).any(axis=1).all())


def largest_overlap(axis: Windows) -> int:
    """Largest number of windows along one axis that read the same pixel.

    Example:
        >>> largest_overlap(adaptive_windows(4, 2)), largest_overlap(adaptive_windows(3, 2))
        (1, 2)
    """
    nonempty = axis.last > axis.first
    edges = np.bincount(axis.first[nonempty], minlength=axis.size_in + 1)
    return int(np.cumsum(edges - np.bincount(axis.last[nonempty], minlength=axis.size_in + 1)).max())


def max_table(windows: int, *, num_in: int, num_out: int) -> NormTable:
    """Norm table of max pooling.

    Args:
        windows: largest number of windows over one pixel.
        num_in: entries of the input.
        num_out: entries of the output.

    Returns:
        The table.

    Guarantee: every entry is at or above the Lipschitz constant; 1→q and p→∞ are attained.

    Example:
        >>> max_table(4, num_in=64, num_out=16)[1][1]
        2.0
    """
    m, n = float(windows), float(num_out)
    table = (
        (m, sqrt_up(m), 1.0),
        (sqrt_up(m * n), sqrt_up(m), 1.0),
        (n, sqrt_up(n), 1.0),
    )
    if not math.isfinite(m * n):
        raise ValueError(f"{windows} windows over {num_out} outputs: too many to count; use a smaller input")
    return tighten(table, num_in=num_in, num_out=num_out)
