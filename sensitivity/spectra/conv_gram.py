"""The 2→2 norm of one zero-padded convolution, borders included, from its banded Gram matrix.

Letters: A the operator, W_a (c_out×c_in) its kernel at tap a; output i reads pixel u through tap a. On the output side
 (A·Aᵀ)[i', i] = Σ over taps a, a' and pixels u that i reads through a and i' through a' of W_a'·W_aᵀ,
and on the input side (Aᵀ·A)[u', u] = Σ over outputs that read u through a and u' through a' of W_a'ᵀ·W_a. Per axis
i' − i (or u' − u) depends on a and a' alone, so the products of pairs of taps, scattered to the positions where both
are real, are the blocks of a banded matrix once its unknowns are ordered pixel by pixel, the shorter axes inside.
Rounding: an entry sums T products at most, T = (channels of the other side)·taps, so |G − exact| ≤ γ_{T+2}·|A||A|ᵀ,
whose 2-norm is at most γ_{T+2}·‖A‖₁‖A‖_∞. Then as in `banded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dsbmv

from sensitivity.rounding import FloatArray, add_up, gamma, inflate, mul_up, scale_to_unit, sqrt_up
from sensitivity.spectra.banded import MAX_BAND_ENTRIES, UNDERFLOW, banded_eigenvalue_up

IntArray = NDArray[np.int64]
PAIR_FLOPS = 1e6  # the fixed cost of one pair of taps
MAX_BLOCK_ENTRIES = 20_000_000  # blocks of one distance of positions: 160 MB, three times
Reads = list[
    tuple[IntArray, IntArray]
]  # along one axis, for each tap: outputs that read a real pixel, and these pixels


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One side of a convolution: positions q that are kept, and positions r that the Gram matrix sums over.

    Attributes:
        kernels: shape (taps, c_kept, c_summed).
        reads: per axis and tap, (q, r).
        kept: positions per axis of the kept side.
        summed: positions per axis of the other side.
        axes: order of the axes in flat positions, outermost first.
    """

    kernels: FloatArray
    reads: list[Reads]
    kept: tuple[int, ...]
    summed: tuple[int, ...]
    axes: tuple[int, ...]

    @cached_property
    def strides(self) -> list[int]:
        """Flat distance of neighbours along each axis on the kept side."""
        strides = [0] * len(self.kept)
        step = 1
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.kept[axis]
        return strides

    @cached_property
    def side(self) -> int:
        return int(math.prod(self.kept) * self.kernels.shape[1])

    @cached_property
    def band(self) -> int:
        """Bandwidth of the Gram matrix; no pair of taps reaches further."""
        reach = [_reach(reads) for reads in self.reads]
        channels = self.kernels.shape[1]
        far = sum(step * distance for step, distance in zip(self.strides, reach, strict=True))
        return int(min(far * channels + channels - 1, self.side - 1))

    @cached_property
    def flops(self) -> float:
        """Work of building the Gram matrix, of a guess and of one factorisation, estimated."""
        _, kept, summed = self.kernels.shape
        pairs = math.prod(len(reads) ** 2 for reads in self.reads) / 2.0
        build = pairs * (2.0 * kept * kept * summed + 4.0 * math.prod(self.kept) * kept * kept + PAIR_FLOPS)
        return float(build) + self.side * float(self.band + 1) ** 2 + 60.0 * self.product_flops

    @property
    def product_flops(self) -> float:
        """Work of one product with the Gram matrix, by taps or by its band, the cheaper."""
        return min(self.tap_flops, self.band_flops)

    @property
    def tap_flops(self) -> float:
        """Work of one product tap by tap; gathering costs more than multiplying where channels are few."""
        hits = math.prod(sum(q.size for q, _ in reads) for reads in self.reads)
        num_taps, kept, summed = self.kernels.shape
        return float(4.0 * hits * kept * summed + 40.0 * hits * (kept + summed) + 4e5 * num_taps)

    @property
    def band_flops(self) -> float:
        return 16.0 * (self.band + 1) * self.side


def conv_singular_value_up(
    kernel: FloatArray,
    *,
    reads: list[Reads],
    size_in: tuple[int, ...],
    size_out: tuple[int, ...],
    flops: float,
) -> tuple[float, str] | None:
    """Upper bound on the largest singular value of one group of a convolution.

    Args:
        kernel: float64, shape (c_out, c_in, k_1, …), taps that touch padding alone set to 0.
        reads: per axis and tap, the outputs that read a real pixel through it, and these pixels.
        size_in: pixels per axis of the input.
        size_out: pixels per axis of the output.
        flops: floating-point operations to spend.

    Returns:
        The bound, rounded up, about 5e-8 above the truth in relative terms (more where Lanczos
            missed the largest eigenvalue), and how it was certified; or None if the
        work or the memory would not suffice.

    Raises:
        ValueError: if the kernel holds NaN or infinity.

    Guarantee: at or above the largest singular value of the operator, borders included; see the module's text.

    Edge cases: a zero kernel gives 0.0.

    Source: as `banded`.

    Example:
        >>> every = np.arange(3)
        >>> found = conv_singular_value_up(
        ...     np.full((1, 1, 1), 2.0), reads=[[(every, every)]], size_in=(3,), size_out=(3,), flops=1e8
        ... )
        >>> round(found[0], 6), found[1]
        (2.0, 'banded Cholesky')
    """
    scaled, scale = scale_to_unit(kernel)
    if not scaled.any():
        return 0.0, "zero kernel"
    side = min(_sides(scaled, reads, size_in=size_in, size_out=size_out), key=lambda one: one.flops)
    entries = max(
        (side.band + 1) * side.side, MAX_BAND_ENTRIES // MAX_BLOCK_ENTRIES * side.kernels.shape[1] * side.side
    )
    if side.flops > flops or entries > MAX_BAND_ENTRIES:
        return None
    magnitudes = np.abs(side.kernels)
    num_taps, kept, summed = magnitudes.shape
    by_kept = inflate(float(magnitudes.sum(axis=(0, 2)).max()), num_operations=num_taps * summed)
    by_summed = inflate(float(magnitudes.sum(axis=(0, 1)).max()), num_operations=num_taps * kept)
    num_terms = num_taps * summed + 2
    product_of_sums = mul_up(by_kept, by_summed)
    negated, product_with = _gram_of(side)
    found = banded_eigenvalue_up(
        negated,
        band=side.band,
        side=side.side,
        product=product_with,
        product_flops=side.product_flops,
        largest_diagonal=mul_up(1.001, product_of_sums),
        error=add_up(mul_up(gamma(num_terms), product_of_sums), UNDERFLOW),
        flops=flops,
    )
    return None if found is None else (mul_up(sqrt_up(found[0]), scale), found[1])


def _sides(
    kernel: FloatArray, reads: list[Reads], *, size_in: tuple[int, ...], size_out: tuple[int, ...]
) -> list[_Side]:
    """The output side and the input side, each with the order of axes that gives the smallest band."""
    c_out, c_in = kernel.shape[:2]
    by_tap = kernel.reshape(c_out, c_in, -1).transpose(2, 0, 1)
    turned = [[(pixels, outputs) for outputs, pixels in along] for along in reads]
    made = []
    for kernels, pairs, kept, summed in (
        (by_tap, reads, size_out, size_in),
        (by_tap.transpose(0, 2, 1), turned, size_in, size_out),
    ):
        candidates = [
            _Side(kernels=np.ascontiguousarray(kernels), reads=pairs, kept=kept, summed=summed, axes=axes)
            for axes in permutations(range(len(kept)))
        ]
        made.append(min(candidates, key=lambda one: one.band))
    return made


def _reach(reads: Reads) -> int:
    """Largest distance of two kept positions that share a summed one, along one axis."""
    shared = np.concatenate([r for _, r in reads])
    if shared.size == 0:
        return 0
    low, high = np.full(int(shared.max()) + 1, np.iinfo(np.int64).max), np.full(int(shared.max()) + 1, -1)
    for q, r in reads:
        low[r], high[r] = np.minimum(low[r], q), np.maximum(high[r], q)
    touched = high >= 0
    return int((high[touched] - low[touched]).max())


def _negated_band(side: _Side) -> FloatArray:
    """The lower diagonals of −G, shape (band + 1, side), in Fortran order."""
    channels = side.kernels.shape[1]
    band = np.zeros((side.band + 1, side.side), order="F")
    num_taps = [len(reads) for reads in side.reads]
    by_distance = [_pairs_by_distance(reads) for reads in side.reads]
    strides = side.strides
    o = np.arange(channels)
    for distances in product(*by_distance):
        far = sum(step * distance for step, distance in zip(strides, distances, strict=True))
        if far < 0 or (far == 0 and any(distances)):
            continue
        block = np.zeros((*side.kept, channels, channels))
        for pair in product(*(axis[distance] for axis, distance in zip(by_distance, distances, strict=True))):
            first = np.ravel_multi_index([a for a, _, _ in pair], num_taps)
            second = np.ravel_multi_index([b for _, b, _ in pair], num_taps)
            block[tuple(q for _, _, q in pair)] += side.kernels[second] @ side.kernels[first].T
        flat = _flat_positions(side.kept, strides)
        # The rows q + distance exist wherever a pair was found; elsewhere the block is 0 and must not be stored.
        exists = [np.arange(size) + d for size, d in zip(side.kept, distances, strict=True)]
        inside = np.ix_(*(np.flatnonzero((e >= 0) & (e < n)) for e, n in zip(exists, side.kept, strict=True)))
        below = far * channels + o[:, None] - o[None, :]
        kept = below >= 0
        columns = flat[inside].reshape(-1, 1) * channels + np.broadcast_to(o[None, :], below.shape)[kept]
        band[below[kept], columns] = -block[inside].reshape(-1, channels, channels)[:, kept]
    return band


def _pairs_by_distance(reads: Reads) -> dict[int, list[tuple[int, int, slice]]]:
    """Pairs of taps (a, b) by q_b − q_a, with the positions q_a from which both reach one summed position."""
    found: dict[int, list[tuple[int, int, slice]]] = {}
    for a, (q_a, r_a) in enumerate(reads):
        for b, (q_b, r_b) in enumerate(reads):
            _, at_a, at_b = np.intersect1d(r_a, r_b, assume_unique=True, return_indices=True)
            if at_a.size:
                distance = int(q_b[at_b[0]] - q_a[at_a[0]])
                found.setdefault(distance, []).append((a, b, _as_slice(q_a[at_a])))
    return found


def _as_slice(positions: IntArray) -> slice:
    """Evenly spaced positions, as those of one tap are, and so those that two taps share."""
    step = int(positions[1] - positions[0]) if positions.size > 1 else 1
    evenly = slice(int(positions[0]), int(positions[-1]) + 1, step)
    if not np.array_equal(np.arange(evenly.start, evenly.stop, step), positions):
        raise ValueError(f"positions {positions} are not evenly spaced: those of a convolution are; pass reads of one")
    return evenly


def _flat_positions(sizes: tuple[int, ...], strides: list[int]) -> IntArray:
    flat = np.zeros(sizes, dtype=np.int64)
    for axis, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        shape = [1] * len(sizes)
        shape[axis] = size
        flat = flat + (np.arange(size) * step).reshape(shape)
    return flat


def _gram_of(side: _Side) -> tuple[Callable[[], FloatArray], Callable[[FloatArray], FloatArray]]:
    """What makes −G afresh, and the map v ↦ G·v, by its band or tap by tap, for the guess."""
    if side.band_flops <= side.tap_flops:
        made = _negated_band(side)
        return lambda: made.copy(order="F"), lambda v: dsbmv(side.band, -1.0, made, v, lower=1)
    return lambda: _negated_band(side), _product_by_taps(side)


def _product_by_taps(side: _Side) -> Callable[[FloatArray], FloatArray]:
    taps = []
    kept_flat = _flat_positions(side.kept, side.strides)
    summed_flat = np.arange(math.prod(side.summed)).reshape(side.summed)
    for kernel, reads in zip(side.kernels, product(*side.reads), strict=True):
        q = kept_flat[np.ix_(*(along[0] for along in reads))].reshape(-1)
        r = summed_flat[np.ix_(*(along[1] for along in reads))].reshape(-1)
        if q.size:
            taps.append((kernel, q, r))
    _, c_kept, c_summed = side.kernels.shape

    def apply(v: FloatArray) -> FloatArray:
        kept, summed = v.reshape(-1, c_kept), np.zeros((summed_flat.size, c_summed))
        for kernel, q, r in taps:
            summed[r] += kept[q] @ kernel
        back = np.zeros_like(kept)
        for kernel, q, r in taps:
            back[q] += summed[r] @ kernel.T
        return back.reshape(-1)

    return apply
