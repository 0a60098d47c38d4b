"""Norm tables of pooling layers.

Average pooling is separable: the operator is A_1 ⊗ A_2 on every channel, where A[i, u] is the weight of pixel u in
window i of one axis (every divisor rule of PyTorch factors over the axes). All norms of a Kronecker product that are
needed here are products.
Max pooling: each output moves by at most the largest move in its window; with m the largest number of windows over one
pixel, p→p is m^{1/p}, 1→2 √m, p→∞ 1, ∞→q n_out^{1/q} and 2→1 at most √(m·n_out).
"""

from __future__ import annotations

import math

import numpy as np

from sensitivity.linear import MatrixSums, matrix_sums, table_from_sums
from sensitivity.norms import NormTable, tighten
from sensitivity.rounding import FloatArray, mul_up, sqrt_up
from sensitivity.spectral import largest_singular_value_up


def average_weights(
    size_in: int,
    size_out: int,
    *,
    kernel: int,
    stride: int,
    padding: int,
    count_include_pad: bool,
    divisor: int | None,
) -> FloatArray:
    """Weights of average pooling along one axis.

    Args:
        size_in: pixels of the input axis.
        size_out: windows along the axis.
        kernel: window length.
        stride: step between windows.
        padding: zeros added on both sides.
        count_include_pad: whether padding counts in the divisor (positions past the padded end never count).
        divisor: fixed divisor of this axis, or None.

    Returns:
        A, shape (size_out, size_in): A[i, u] is 1/divisor inside window i, else 0; correctly rounded.

    Source: PyTorch, aten/src/ATen/native/cpu/AvgPoolKernel.cpp (hstart, hend and pool_size).

    Example:
        >>> average_weights(4, 2, kernel=2, stride=2, padding=0, count_include_pad=True, divisor=None)
        array([[0.5, 0.5, 0. , 0. ],
               [0. , 0. , 0.5, 0.5]])
    """
    weights = np.zeros((size_out, size_in))
    for i in range(size_out):
        start = i * stride - padding
        end = min(start + kernel, size_in + padding)
        first, last = max(start, 0), min(end, size_in)
        if last > first:
            counted = end - start if count_include_pad else last - first
            weights[i, first:last] = 1.0 / (counted if divisor is None else divisor)
    return weights


def adaptive_weights(size_in: int, size_out: int) -> FloatArray:
    """Weights of adaptive average pooling along one axis: window i is [⌊i·n/m⌋, ⌈(i+1)·n/m⌉).

    Example:
        >>> adaptive_weights(3, 2)
        array([[0.5, 0.5, 0. ],
               [0. , 0.5, 0.5]])
    """
    weights = np.zeros((size_out, size_in))
    for i in range(size_out):
        first, last = i * size_in // size_out, -(-(i + 1) * size_in // size_out)
        weights[i, first:last] = 1.0 / (last - first)
    return weights


def average_table(A_1: FloatArray, A_2: FloatArray, *, channels: int) -> NormTable:
    """Norm table of A_1 ⊗ A_2 applied to every channel.

    Args:
        A_1: weights along the first axis, shape (out, in).
        A_2: weights along the second axis, shape (out, in).
        channels: number of channels.

    Returns:
        The table, with exact 1→q, p→∞ and 2→2 up to rounding.

    Guarantee: every entry is at or above the true norm; one unit in the last place covers the rounded weights
        1/divisor.
    """
    first, second = matrix_sums(A_1), matrix_sums(A_2)

    def up(a: float, b: float) -> float:
        return mul_up(mul_up(a, b), 1.0 + 2.0**-50)

    many = float(channels)
    sums = MatrixSums(
        num_in=first.num_in * second.num_in * channels,
        num_out=first.num_out * second.num_out * channels,
        largest_entry=up(first.largest_entry, second.largest_entry),
        column_l1=up(first.column_l1, second.column_l1),
        column_l2=up(first.column_l2, second.column_l2),
        row_l1=up(first.row_l1, second.row_l1),
        row_l2=up(first.row_l2, second.row_l2),
        columns_l1_l2=up(up(first.columns_l1_l2, second.columns_l1_l2), sqrt_up(many)),
        rows_l1_l2=up(up(first.rows_l1_l2, second.rows_l1_l2), sqrt_up(many)),
        total_l1=up(up(first.total_l1, second.total_l1), many),
    )
    return table_from_sums(sums, spectral=up(largest_singular_value_up(A_1), largest_singular_value_up(A_2)))


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
    for i in range(size_out):
        positions = i * stride - padding + dilation * np.arange(kernel)
        counts[positions[(positions >= 0) & (positions < size_in)]] += 1
    return int(counts.max())


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
