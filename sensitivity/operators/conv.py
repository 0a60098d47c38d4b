"""Norm tables of zero-padded convolutions over one to three axes, borders, stride, dilation and groups included.

Letters: W (c_out, c_in/groups, k_1, …) the kernel; output i reads input i·stride + a·dilation − padding through tap a,
per axis. Distinct taps of one output read distinct pixels, so every matrix entry is one kernel entry. The row sum at
output (i, j) is therefore Σ_ab |W_ab|^r·V_1[i,a]·V_2[j,b] with V[i,a] = 1 where the tap hits a real pixel, and the
column sum follows in the same way: exact with borders, and separable. Outputs whose taps hit alike share their sums,
so each sum is taken once per kind of border, and the matrix is not built.
A transposed convolution's matrix is the transpose of that of the convolution with the same kernel, from the larger
image to the smaller; output_padding only adds pixels to the larger one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sensitivity.norms import NormTable
from sensitivity.operators.linear import MatrixSums, table_from_sums
from sensitivity.rounding import FloatArray, add_up, inflate, mul_up, norm2_up, scale_to_unit, sqrt_up
from sensitivity.spectra.conv_gram import conv_singular_value_up
from sensitivity.spectra.dense import largest_singular_value_up
from sensitivity.spectra.scaling import inf_to_1_up, inf_to_2_up, two_to_1_up
from sensitivity.spectra.symbol import least_symbol_flops, patch_bound, symbol_bound

IntArray = NDArray[np.int64]
LEAST_FOR_SYMBOLS = 1e7  # symbol_flops from which the coarsest grid of a symbol is paid for, whatever it costs
MAX_HITS = 2**26  # entries of an (outputs × taps) table along one axis: 512 MiB


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """Shape facts of a convolution over one to three axes.

    Attributes:
        size_in: pixels per axis of the input.
        size_out: pixels per axis of the output.
        stride: per axis.
        padding: zeros added on both sides, per axis.
        dilation: per axis.
        groups: number of channel groups.
    """

    size_in: tuple[int, ...]
    size_out: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def conv_table(
    W: FloatArray, *, geometry: ConvGeometry, dense_entries: int, symbol_flops: float, flops: float = 0.0
) -> tuple[NormTable, str]:
    """Norm table of a convolution.

    Args:
        W: float64 kernel, shape (c_out, c_in/groups, k_1, …), one to three axes.
        geometry: sizes, stride, padding, dilation and groups.
        dense_entries: build one group's matrix and take its singular value if it has at most this many entries.
        symbol_flops: floating-point operations to spend on the symbol bound of 2→2. Below LEAST_FOR_SYMBOLS, patches
            bound the kernels for which it does not suffice.
        flops: floating-point operations to spend on the banded certificate of 2→2, and on ∞→1, ∞→2 and 2→1 by
            diagonal scaling where one group's matrix has at most `dense_entries` entries.

    Returns:
        The table (1→q and p→∞ exact up to rounding, 2→2 a certified upper bound, the rest upper bounds), and how 2→2
        was certified, in words.

    Raises:
        ValueError: if W holds NaN or infinity.

    Guarantee: every entry is at or above the norm of the zero-padded operator on this input size.
    """
    for size, taps in zip((*geometry.size_in, *geometry.size_out), W.shape[2:] * 2, strict=True):
        _require_room(size, taps)
    W = reached_taps(W, geometry=geometry)
    per_group = np.split(W, geometry.groups, axis=0)
    c_out, c_in = per_group[0].shape[:2]
    is_small = c_out * math.prod(geometry.size_out) * c_in * math.prod(geometry.size_in) <= dense_entries
    spectral, how = _spectral_bound(
        per_group, replace(geometry, groups=1), is_small=is_small, symbol_flops=symbol_flops, flops=flops
    )
    table = table_from_sums(conv_sums(W, geometry=geometry), spectral=spectral)
    if table[1][1] < spectral:
        how = "row and column sums"
    if is_small and flops > 0.0:
        table = _with_scaling(table, per_group, replace(geometry, groups=1), flops=flops)
    return table, how


def _with_scaling(table: NormTable, per_group: list[FloatArray], geometry: ConvGeometry, *, flops: float) -> NormTable:
    """The table with 2→1, ∞→1 and ∞→2 by diagonal scaling, which adds up over the groups' blocks."""
    share = flops / (6.0 * len(per_group))
    two_one, inf_one, inf_two = [], [], []
    for kernel in per_group:
        block = conv_matrix(kernel, geometry=geometry).toarray()
        two_one.append(two_to_1_up(block, flops=share))
        inf_one.append(inf_to_1_up(block, flops=share))
        inf_two.append(inf_to_2_up(block, flops=share))
    (one, two, inf) = table
    return (
        one,
        (min(two[0], norm2_up(two_one)), two[1], two[2]),
        (min(inf[0], add_up(*inf_one)), min(inf[1], norm2_up(inf_two)), inf[2]),
    )


def transposed_table(table: NormTable) -> NormTable:
    """Norm table of the transposed matrix: p→q of Wᵀ is q*→p* of W, * the dual norm.

    Example:
        >>> transposed_table(((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)))
        ((9.0, 6.0, 3.0), (8.0, 5.0, 2.0), (7.0, 4.0, 1.0))
    """
    rows = [(table[2][2 - r], table[1][2 - r], table[0][2 - r]) for r in range(3)]
    return rows[0], rows[1], rows[2]


def conv_sums(W: FloatArray, *, geometry: ConvGeometry) -> MatrixSums:
    """Row and column sums of the unrolled convolution, rounded up.

    Args:
        W: float64 kernel, shape (c_out, c_in/groups, k_1, …).
        geometry: sizes, stride, padding, dilation and groups.

    Returns:
        The sums over the whole operator, all groups together.

    Raises:
        ValueError: if W holds NaN or infinity.
    """
    scaled, scale = scale_to_unit(reached_taps(W, geometry=geometry))
    A = np.abs(scaled)
    c_out, c_in_group, *taps = A.shape
    axes = range(len(taps))
    row_kinds = [_kinds(_taps_by_output(geometry, axis, taps[axis])) for axis in axes]
    column_kinds = [_kinds(_taps_by_input(geometry, axis, taps[axis])) for axis in axes]
    by_group = A.reshape(geometry.groups, c_out // geometry.groups, c_in_group, *taps)
    per_column = by_group.sum(axis=1).reshape(-1, *taps)
    squares_per_column = (by_group * by_group).sum(axis=1).reshape(-1, *taps)
    row_l1, column_l1 = _summed(A.sum(axis=1), row_kinds), _summed(per_column, column_kinds)
    row_squares, column_squares = _summed((A * A).sum(axis=1), row_kinds), _summed(squares_per_column, column_kinds)
    rows, columns = _copies(row_kinds), _copies(column_kinds)
    num_terms_row = c_in_group * math.prod(taps) + 8
    num_terms_column = (c_out // geometry.groups) * math.prod(taps) + 8

    def up(value: float, num_operations: int) -> float:
        return mul_up(inflate(value, num_operations=num_operations), scale)

    return MatrixSums(
        num_in=c_in_group * geometry.groups * math.prod(geometry.size_in),
        num_out=c_out * math.prod(geometry.size_out),
        largest_entry=mul_up(float(A.max()), scale),
        column_l1=up(float(column_l1.max()), num_terms_column),
        column_l2=up(sqrt_up(float(column_squares.max())), num_terms_column),
        row_l1=up(float(row_l1.max()), num_terms_row),
        row_l2=up(sqrt_up(float(row_squares.max())), num_terms_row),
        columns_l1_l2=up(sqrt_up(float(np.sum(column_l1**2 * columns))), num_terms_column + column_l1.size),
        rows_l1_l2=up(sqrt_up(float(np.sum(row_l1**2 * rows))), num_terms_row + row_l1.size),
        total_l1=up(float(np.sum(row_l1 * rows)), num_terms_row + row_l1.size),
    )


def reached_taps(W: FloatArray, *, geometry: ConvGeometry) -> FloatArray:
    """The kernel with 0 at taps that touch padding alone: they are no part of the operator, however large.

    Args:
        W: float64 kernel, shape (…, k_1, …), one axis of taps per axis of the geometry.
        geometry: sizes, stride, padding and dilation.

    Returns:
        A kernel of the same shape with the same operator.
    """
    first = W.ndim - len(geometry.size_in)
    kept = W
    for axis in range(len(geometry.size_in)):
        reached = np.array([outputs.size > 0 for outputs, _ in pixels_read(geometry, axis, W.shape[first + axis])])
        shape = [1] * W.ndim
        shape[first + axis] = reached.size
        kept = np.where(reached.reshape(shape), kept, 0.0)
    return kept


def conv_matrix(W: FloatArray, *, geometry: ConvGeometry) -> sparse.csr_array:
    """Sparse matrix of a convolution, all groups, rows (channel, i, …) and columns (channel, u, …) as torch flattens them.

    Args:
        W: float64 kernel, shape (c_out, c_in/groups, k_1, …).
        geometry: sizes, stride, padding, dilation and groups.

    Returns:
        The matrix, exact: every stored entry is a kernel entry, columns sorted.

    Example:
        >>> geometry = ConvGeometry(size_in=(3,), size_out=(2,), stride=(1,), padding=(0,), dilation=(1,), groups=1)
        >>> conv_matrix(np.array([[[1.0, 2.0]]]), geometry=geometry).toarray().tolist()
        [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    """
    c_out, c_in, *taps = W.shape
    num_pixels, num_places = math.prod(geometry.size_in), math.prod(geometry.size_out)
    place, tap, pixel = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for axis, num_taps in enumerate(taps):
        read = pixels_read(geometry, axis, num_taps)
        i = np.concatenate([outputs for outputs, _ in read])
        u = np.concatenate([pixels for _, pixels in read])
        a = np.repeat(np.arange(num_taps), [outputs.size for outputs, _ in read])
        place = (place[:, None] * geometry.size_out[axis] + i).reshape(-1)
        tap = (tap[:, None] * num_taps + a).reshape(-1)
        pixel = (pixel[:, None] * geometry.size_in[axis] + u).reshape(-1)
    order = np.lexsort((tap, place))  # pixels rise with taps
    place, tap, pixel = place[order], tap[order], pixel[order]
    # One output channel: for each place, the channels one after the other, each with the place's taps.
    hits = np.bincount(place, minlength=num_places)
    first_hit = np.cumsum(hits) - hits
    owner = np.repeat(np.arange(num_places), hits * c_in)
    within = np.arange(owner.size) - np.repeat((np.cumsum(hits) - hits) * c_in, hits * c_in)
    channel, turn = np.divmod(within, hits[owner])
    hit = first_hit[owner] + turn
    columns = channel * num_pixels + pixel[hit]
    data = W.reshape(c_out, -1)[:, channel * math.prod(taps) + tap[hit]].reshape(-1)
    per_group = c_out // geometry.groups
    offsets = (np.arange(c_out) // per_group) * (c_in * num_pixels)
    shape = (c_out * num_places, c_in * geometry.groups * num_pixels)
    kind = np.int32 if max(*shape, data.size) < 2**31 else np.int64
    indices = (columns.astype(kind)[None, :] + offsets.astype(kind)[:, None]).reshape(-1)
    indptr = np.concatenate([[0], np.cumsum(np.tile(hits * c_in, c_out))]).astype(kind)
    made = sparse.csr_array((data, indices, indptr), shape=shape)
    made.has_sorted_indices = True
    return made


def _spectral_bound(
    per_group: list[FloatArray], geometry: ConvGeometry, *, is_small: bool, symbol_flops: float, flops: float
) -> tuple[float, str]:
    """The largest 2→2 norm of a group: symbol bounds for all, better certificates from the largest of these downward."""
    share = symbol_flops / len(per_group)
    stride, dilation, first = geometry.stride, geometry.dilation, "symbol"
    if is_small and len(per_group) == 1:
        symbols = [math.inf]
    elif symbol_flops < LEAST_FOR_SYMBOLS and share < least_symbol_flops(
        per_group[0], stride=stride, dilation=dilation
    ):
        symbols, first = [patch_bound(W, stride=stride, dilation=dilation) for W in per_group], "patches"
    else:
        symbols = [symbol_bound(W, stride=stride, dilation=dilation, flops=share) for W in per_group]
    best, how = 0.0, first
    for group in np.argsort(symbols)[::-1]:
        if symbols[group] <= best:
            break
        found = _better_than_symbol(
            per_group[group], geometry, is_small=is_small, flops=flops / len(per_group), symbol_flops=share
        )
        value, its_how = min((symbols[group], first), found)
        if value > best:
            best, how = value, its_how
    return best, how


def _better_than_symbol(
    kernel: FloatArray, geometry: ConvGeometry, *, is_small: bool, flops: float, symbol_flops: float
) -> tuple[float, str]:
    """A dense or banded certificate of one group's 2→2 norm, or a finer symbol where the work suffices for neither."""
    if is_small:
        return largest_singular_value_up(conv_matrix(kernel, geometry=geometry).toarray()), "dense Cholesky"
    if flops > 0.0 and math.prod(kernel.shape[2:]) > 1:  # with one tap the symbol is the operator
        found = conv_singular_value_up(
            kernel,
            reads=[pixels_read(geometry, axis, num_taps) for axis, num_taps in enumerate(kernel.shape[2:])],
            size_in=geometry.size_in,
            size_out=geometry.size_out,
            flops=flops,
        )
        if found is not None:
            return found
        if flops > symbol_flops:
            return symbol_bound(kernel, stride=geometry.stride, dilation=geometry.dilation, flops=flops), "symbol"
    return math.inf, ""


def pixels_read(geometry: ConvGeometry, axis: int, num_taps: int) -> list[tuple[IntArray, IntArray]]:
    """For each tap along an axis, the outputs that read a real pixel through it, and these pixels."""
    outputs = np.arange(geometry.size_out[axis])
    found = []
    for a in range(num_taps):
        pixels = outputs * geometry.stride[axis] + a * geometry.dilation[axis] - geometry.padding[axis]
        real = (pixels >= 0) & (pixels < geometry.size_in[axis])
        found.append((outputs[real], pixels[real]))
    return found


def _kinds(hits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The different rows of a table of hits, and how often each occurs."""
    rows, counts = np.unique(hits, axis=0, return_counts=True)
    return rows, counts.astype(np.float64)


def _summed(per_tap: FloatArray, kinds: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Σ over taps of values (channels, taps…) at each kind of position: (channels, kinds…)."""
    for hits, _ in kinds:
        per_tap = np.tensordot(per_tap, hits, axes=(1, 1))
    return per_tap


def _copies(kinds: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """How many positions are of each kind, shape (kinds…); integers, exact."""
    copies = np.ones(())
    for _, counts in kinds:
        copies = copies[..., None] * counts
    return copies


def _taps_by_output(geometry: ConvGeometry, axis: int, num_taps: int) -> FloatArray:
    """V[i, a] = 1 where tap a of output i hits a real pixel; one row per output."""
    hits = _empty_hits(geometry.size_out[axis], num_taps)
    for a, (outputs, _) in enumerate(pixels_read(geometry, axis, num_taps)):
        hits[outputs, a] = 1.0
    return hits


def _taps_by_input(geometry: ConvGeometry, axis: int, num_taps: int) -> FloatArray:
    """V[u, a] = 1 where some output reads pixel u through tap a."""
    hits = _empty_hits(geometry.size_in[axis], num_taps)
    for a, (_, pixels) in enumerate(pixels_read(geometry, axis, num_taps)):
        hits[pixels, a] = 1.0
    return hits


def _empty_hits(size: int, num_taps: int) -> FloatArray:
    _require_room(size, num_taps)
    return np.zeros((size, num_taps))


def _require_room(size: int, num_taps: int) -> None:
    if size * num_taps > MAX_HITS:
        raise ValueError(
            f"{num_taps} taps on {size} pixels are more than fit into memory here; use a smaller kernel or input"
        )
