"""2→2 of programs that look the same everywhere, on a torus: one small problem per frequency.

A program whose matrices and constraints agree with themselves shifted by a period (zero-padded or unpadded
convolutions of any stride, averages, activations) is put on a torus of M cells per axis, a cell being one period. Each
variable becomes a field of channels, those of one cell, over all cells, and each matrix a circular convolution with the
same taps. With M at least the number of cells of the grids plus the farthest tap, no tap that reaches around the torus
joins two places inside the grids; so x and z of the program, extended by zeros, satisfy the torus' equations inside,
and outside z = 0 is within the constraints, whose slopes are widened to hold 0. Hence the torus' largest ‖y‖₂ is at
least the program's. Nothing is interpolated: the torus has finitely many frequencies.

With multipliers that are the same in every cell the form F of `response` is block diagonal in frequencies, so its
bound is the largest of theirs; θ and −θ give conjugates, so one of them is looked at. Lifted vectors hold one complex
entry per frequency, as two real ones.

Source: C. Pauli, D. Gramlich, F. Allgöwer (2023), Lipschitz constant estimation for 1D convolutional neural networks,
 for the use of shift invariance; the embedding is that of Toeplitz matrices into circulant ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray
from sensitivity.semidefinite.constraints import Constraint, IntArray, Slopes, WholeNorm
from sensitivity.semidefinite.footprints import MAX_CHECKED, Grid, Grids, is_shift_invariant, steps_of
from sensitivity.semidefinite.lifting import BALL_STEPS, multipliers
from sensitivity.semidefinite.program import Matrix, Program, values_of
from sensitivity.semidefinite.response import MAX_SIDE, norm_up, response_flops

MAX_NUMBERS = 12_000_000  # complex entries of all frequencies' matrices: 190 MB
COMPLEX_WORK = 4.0
ATTEMPTS = 2.0
Spend = Callable[[float], bool]


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """One matrix per frequency; acts on lifted vectors of real and then imaginary parts, frequency by frequency.

    Attributes:
        values: complex, shape (frequencies, rows, columns).
    """

    values: NDArray[np.complex128]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.values.shape[1], self.values.shape[2]

    @property
    def size(self) -> int:
        """Entries of all frequencies."""
        return self.values.size

    @cached_property
    def T(self) -> Spectrum:  # noqa: N802
        """The adjoint."""
        return Spectrum(values=np.conj(np.swapaxes(self.values, 1, 2)))

    def __matmul__(self, lifted: FloatArray) -> FloatArray:
        count = self.values.shape[0]
        fields = (lifted[:, :count] + 1j * lifted[:, count:]).T[:, :, None]
        moved = (self.values @ fields)[:, :, 0].T
        return np.concatenate([moved.real, moved.imag], axis=1)


@dataclass(frozen=True, kw_only=True)
class Taps:
    """A circular convolution between fields.

    Attributes:
        offsets: shape (taps, axes), in cells.
        kernels: one matrix per offset, shape (channels out, channels in).
    """

    offsets: IntArray
    kernels: list[sparse.csr_array]

    @property
    def reach(self) -> IntArray:
        """The farthest tap per axis."""
        reach: IntArray = np.abs(self.offsets).max(axis=0)
        return reach

    def at(self, frequencies: IntArray, cells: IntArray) -> tuple[NDArray[np.complex128], float]:
        """The matrices at 2π·frequencies/cells, and the Frobenius norm of their error.

        Guarantee: turns r/M with r reduced exactly add up to at most one per axis, so their angle is off by less than
            40·u, and its sine and cosine by less than 64·u; a sum of n terms adds γ_n.
        """
        turns = (frequencies[:, None, :] * self.offsets[None]) % cells / cells
        phases = np.exp(-2j * math.pi * turns.sum(axis=2))
        values = np.zeros((len(frequencies), *self.kernels[0].shape), dtype=np.complex128)
        size = 0.0
        for tap, kernel in enumerate(self.kernels):
            entries = kernel.tocoo()
            values[:, entries.row, entries.col] += phases[:, tap, None] * entries.data
            size += float(np.linalg.norm(entries.data)) * (1.0 + 2.0**-20)
        return values, (len(self.kernels) + 64.0) * 2.0 * UNIT_ROUNDOFF * size


def torus_up(program: Program, grids: Grids, *, spend: Spend) -> float | None:
    """A bound on the largest ‖y‖₂ over ‖x‖₂ ≤ 1 that costs hardly more for larger grids.

    Args:
        program: the program, its matrices sparse or dense.
        grids: shapes of its variables.
        spend: takes work if it is left, and says whether it was.

    Returns:
        The bound, rounded up; None if the program does not look the same everywhere, or it does not fit.

    Guarantee: at or above the largest ‖y‖₂; see the module's text.
    """
    if not all(isinstance(constraint, Slopes | WholeNorm) for constraint in program.constraints):
        return None
    steps = steps_of(program, grids)
    if steps is None or any(
        np.count_nonzero(values_of(A)) > MAX_CHECKED for terms in program.reads for A in terms.values()
    ):
        return None
    if not is_shift_invariant(program, grids, steps):
        return None
    count = len(program.constraints)
    if not all(values_of(A).size for terms in program.reads for A in terms.values()):
        return None
    u_steps, z_steps = steps[1 : count + 2], [steps[0], *steps[count + 2 :]]
    z_grids = (grids.x, *grids.z)
    taps = {
        (k, i): _taps(A, grids.u[k], u_steps[k], z_grids[i], z_steps[i])
        for k, terms in enumerate(program.reads)
        for i, A in terms.items()
    }
    cells = np.max([-(-np.array(grid[1:]) // step) for grid, step in zip(grids.all, steps, strict=True)], axis=0)
    cells = cells + np.max([tap.reach for tap in taps.values()], axis=0)
    frequencies = _half(cells)
    channels = [_num_channels(grid, step) for grid, step in zip(z_grids, z_steps, strict=True)]
    outputs = _num_channels(grids.u[-1], u_steps[-1])
    numbers = len(frequencies) * sum(tap.kernels[0].shape[0] * tap.kernels[0].shape[1] for tap in taps.values())
    if numbers > MAX_NUMBERS or sum(channels) > MAX_SIDE or not spend(2.0 * COMPLEX_WORK * BALL_STEPS * numbers):
        return None
    constraints = tuple(
        _everywhere(constraint, grid, step, size)
        for constraint, grid, step, size in zip(program.constraints, grids.z, z_steps[1:], channels[1:], strict=True)
    )
    spectra = {key: tap.at(frequencies, cells) for key, tap in taps.items()}

    def on_torus(reads: tuple[dict[int, Matrix], ...]) -> Program:
        errors = {key: error for key, (_, error) in spectra.items()}
        return Program(num_in=channels[0], num_out=outputs, reads=reads, constraints=constraints, errors=errors)

    single = on_torus(tuple({i: spectra[k, i][0][0] for i in terms} for k, terms in enumerate(program.reads)))
    if not spend(ATTEMPTS * COMPLEX_WORK * len(frequencies) * response_flops(single)):
        return None
    whole = on_torus(tuple({i: _acting(spectra[k, i][0]) for i in terms} for k, terms in enumerate(program.reads)))
    found = multipliers(whole, p=2.0, q=2.0, steps=BALL_STEPS, rank=2 * len(frequencies))
    stack = on_torus(tuple({i: spectra[k, i][0] for i in terms} for k, terms in enumerate(program.reads)))
    return norm_up(stack, found, p=2.0, q=2.0)


def _acting(values: NDArray[np.complex128]) -> Matrix:
    """A spectrum in a matrix's place: lifting multiplies by it and its adjoint, and asks for nothing else."""
    return cast(Matrix, Spectrum(values=values))


def _num_channels(grid: Grid, step: IntArray) -> int:
    return grid[0] * int(np.prod(step))


def _channels(entries: IntArray, grid: Grid, step: IntArray) -> tuple[IntArray, IntArray]:
    """Channel within a cell, and cell, of entries of a grid; shapes (n,) and (n, axes)."""
    channel, *places = np.unravel_index(entries, grid)
    spatial = np.stack(places, axis=1)
    phase = spatial % step
    for axis in range(spatial.shape[1]):
        channel = channel * step[axis] + phase[:, axis]
    return channel, spatial // step


def _taps(A: Matrix, rows: Grid, row_step: IntArray, columns: Grid, column_step: IntArray) -> Taps:
    """The taps of a matrix that agrees with itself shifted: any entry of each kind stands for all."""
    entries = sparse.csr_array(A).tocoo()
    out, row_cell = _channels(np.arange(A.shape[0]), rows, row_step)
    into, column_cell = _channels(np.arange(A.shape[1]), columns, column_step)
    least = row_cell.min(axis=0) - column_cell.max(axis=0)
    span = row_cell.max(axis=0) - column_cell.min(axis=0) - least + 1
    shape = (_num_channels(rows, row_step), _num_channels(columns, column_step))
    # The kind of an entry, in mixed radix: how far its row's cell is from its column's, then both channels.
    units = shape[0] * shape[1] * np.cumprod([1, *span[:0:-1]])[::-1]
    of_row, of_column = row_cell @ units + out * shape[1], (column_cell + least) @ units - into
    kinds, first = _first_of_each(of_row[entries.row] - of_column[entries.col], int(shape[0] * shape[1] * span.prod()))
    number, channels = np.divmod(kinds, shape[0] * shape[1])
    kernels, offsets = [], []
    for tap in np.unique(number):
        chosen = number == tap
        values, pair = entries.data[first[chosen]], channels[chosen]
        kernels.append(sparse.csr_array((values, np.divmod(pair, shape[1])), shape=shape))
        offsets.append(np.array(np.unravel_index(tap, tuple(span))) + least)
    return Taps(offsets=np.array(offsets), kernels=kernels)


def _first_of_each(numbers: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The different ones of numbers below `size`, sorted, and where each occurs; by marking, or by sorting a few."""
    if size > 8 * numbers.size:
        different, first = np.unique(numbers, return_index=True)
        return different, first
    place = np.full(size, -1)
    place[numbers] = np.arange(numbers.size)
    different = np.flatnonzero(place >= 0)
    return different, place[different]


def _everywhere(constraint: Constraint, grid: Grid, step: IntArray, size: int) -> Constraint:
    """The constraint of one cell, with 0 among its slopes."""
    if isinstance(constraint, Slopes):
        low, high = np.zeros(size), np.zeros(size)
        channel, _ = _channels(np.arange(constraint.size), grid, step)
        low[channel], high[channel] = constraint.low, constraint.high
        return Slopes(low=np.minimum(low, 0.0), high=np.maximum(high, 0.0)).widened()
    assert isinstance(constraint, WholeNorm)
    return WholeNorm(factor=constraint.factor, size=size, num_read=size)


def _half(cells: IntArray) -> IntArray:
    """One of each frequency and its negative, shape (count, axes)."""
    kept = []
    for frequency in itertools.product(*(range(int(n)) for n in cells)):
        negative = tuple(int(-f % n) for f, n in zip(frequency, cells, strict=True))
        if frequency <= negative:
            kept.append(frequency)
    return np.array(kept)
