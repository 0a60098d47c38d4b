"""What one input entry reaches, and which entries' footprints are shifts of parts of another's.

Write c → l if shifting all grids by some t maps what c reaches into what l reaches, with equal matrix entries and equal
constraints there. Any z of c's program, shifted and extended by zeros, is one of l's, if its constraints allow zeros:
u of l is then that of c on the shifted entries. So ‖y‖_q for l is at least as large as for c: a bound for l bounds c.
Border entries of a zero-padded convolution are such parts of inner ones.

That a matrix agrees with itself shifted is checked entry by entry, for one step along each axis; grids are boxes, so
longer shifts between places inside follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy import sparse

from sensitivity.semidefinite.constraints import IntArray
from sensitivity.semidefinite.program import Matrix, Program, values_of

MAX_CHECKED = 8_000_000  # entries of a matrix that is compared with itself shifted: some 500 MB on the way
Grid = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grids:
    """Shapes, channels first, of what a program's variables stand for.

    Attributes:
        x: of the input.
        u: of what each knot reads, and last of the output.
        z: of what each knot writes.
    """

    x: Grid
    u: tuple[Grid, ...]
    z: tuple[Grid, ...]

    @property
    def all(self) -> tuple[Grid, ...]:
        """Input, all u, all z."""
        return (self.x, *self.u, *self.z)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Entries that may differ from 0 when one input entry does.

    Attributes:
        kept: of x and of every z_k, sorted.
        rows: of every u_k, and last of y, sorted.
    """

    kept: list[IntArray]
    rows: list[IntArray]

    @property
    def key(self) -> bytes:
        """Equal for input entries that reach the same."""
        return b"|".join(part.tobytes() for part in (*self.kept[1:], *self.rows))

    @property
    def size(self) -> int:
        """Entries in all."""
        return sum(part.size for part in (*self.kept, *self.rows))


class Reach:
    """Footprints of a program's input entries."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._turned = [
            {i: sparse.csr_array(sparse.csr_array(A).T.tocsr()) for i, A in terms.items()} for terms in program.reads
        ]
        self._num_rows = [*(constraint.num_read for constraint in program.constraints), program.num_out]

    def visits(self, footprint: Footprint) -> int:
        """Entries that finding this footprint looks at."""
        return sum(int(np.diff(A.indptr)[footprint.kept[i]].sum()) for terms in self._turned for i, A in terms.items())

    def footprint(self, column: int) -> Footprint:
        """What one input entry reaches."""
        kept: list[IntArray] = [np.array([column])]
        rows: list[IntArray] = []
        for k, terms in enumerate(self._turned):
            parts = [_entries_of(A, kept[i]) for i, A in terms.items()]
            rows.append(_distinct(np.concatenate(parts) if parts else np.zeros(0, np.int64), self._num_rows[k]))
            if k < len(self.program.constraints):
                kept.append(self.program.constraints[k].reached(rows[k]))
        return Footprint(kept=kept, rows=rows)


def _entries_of(A: sparse.csr_array, chosen: IntArray) -> IntArray:
    """Columns of all entries in the chosen rows."""
    starts = A.indptr[chosen].astype(np.int64)
    lengths = A.indptr[chosen + 1] - starts
    entries: IntArray = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    return A.indices[entries].astype(np.int64)


def _distinct(numbers: IntArray, size: int) -> IntArray:
    """Sorted, each once; by sorting a few or by marking many."""
    if numbers.size * 20 > size:
        marked = np.zeros(size, dtype=bool)
        marked[numbers] = True
        return np.flatnonzero(marked)
    ordered = np.sort(numbers)
    return ordered[np.concatenate([[True], np.diff(ordered) > 0])] if numbers.size else ordered


def leaders(program: Program, grids: Grids | None, footprints: list[Footprint]) -> IntArray:
    """For every input entry the one whose bound bounds it too.

    Args:
        program: the whole program, its matrices sparse.
        grids: shapes of its variables, or None if unknown.
        footprints: of every input entry.

    Returns:
        Shape (num_in,): the entry itself, or another.

    Guarantee: see the module's text.
    """
    own: IntArray = np.arange(len(footprints))
    large = any(np.count_nonzero(values_of(A)) > MAX_CHECKED for terms in program.reads for A in terms.values())
    steps = None if grids is None or large else steps_of(program, grids)
    if grids is None or steps is None or not is_shift_invariant(program, grids, steps):
        return own
    boxes = [_boxes(grids, footprint) for footprint in footprints]
    periods = steps[0]
    vanishing = all(constraint.may_vanish for constraint in program.constraints)
    place = np.stack(np.unravel_index(own, grids.x), axis=1)
    known: dict[tuple[int, ...], list[int]] = {}
    leader = own.copy()
    for column in sorted(range(len(footprints)), key=lambda c: -footprints[c].size):
        spatial = place[column, 1:]
        group = known.setdefault((int(place[column, 0]), *(int(v) for v in spatial % periods)), [])
        for candidate in group:
            shift = (place[candidate, 1:] - spatial) // periods
            fits = _fits(grids, boxes[column], steps, shift)
            if fits and (vanishing or _same_sizes(footprints[column], footprints[candidate])):
                leader[column] = candidate
                break
        else:
            group.append(column)
    return leader


def _same_sizes(first: Footprint, second: Footprint) -> bool:
    return [part.size for part in (*first.kept, *first.rows)] == [part.size for part in (*second.kept, *second.rows)]


def steps_of(program: Program, grids: Grids) -> list[IntArray] | None:
    """How far each grid moves per axis when all move by one period, the input first; None where they do not fit.

    Strides are read off the matrices: along an axis, the first and the last entry of a row move by the stride from one
    row to the next where no border cuts them. A wrong guess costs a check that fails, nothing else.
    """
    rank = len(grids.x)
    if rank < 2 or any(len(grid) != rank for grid in grids.all):
        return None
    periods_of: list[list[Fraction]] = []
    for axis in range(rank - 1):
        z, u = [Fraction(1)], list[Fraction]()
        for k, terms in enumerate(program.reads):
            found = {z[i] * _stride(A, grids.u[k], (grids.x, *grids.z)[i], axis) for i, A in terms.items()}
            if len(found) != 1:
                return None
            u.append(found.pop())
            if k < len(program.constraints):
                pattern = getattr(program.constraints[k], "pattern", None)
                stride = Fraction(1) if pattern is None else _stride(pattern, grids.z[k], grids.u[k], axis)
                z.append(u[k] * stride)
        periods_of.append([z[0], *u, *z[1:]])
    steps = []
    periods = [math.lcm(*(scale.numerator for scale in scales)) for scales in periods_of]
    for number in range(len(grids.all)):
        moved = [period / scales[number] for period, scales in zip(periods, periods_of, strict=True)]
        if any(step.denominator != 1 for step in moved):
            return None
        steps.append(np.array([int(step) for step in moved]))
    return steps


def _stride(A: Matrix, rows: Grid, columns: Grid, axis: int) -> Fraction:
    """Columns that a matrix moves by per row, along an axis."""
    entries = sparse.csr_array(A).tocoo()
    row, column = _places(rows, axis)[entries.row], _places(columns, axis)[entries.col]
    down = _largest_move(row, column, rows[axis + 1])
    return (
        Fraction(down) if down > 1 or rows[axis + 1] < 2 else Fraction(1, _largest_move(column, row, columns[axis + 1]))
    )


def _places(grid: Grid, axis: int) -> IntArray:
    """Place along an axis of every entry of a grid."""
    places: IntArray = np.arange(math.prod(grid)) // math.prod(grid[axis + 2 :]) % grid[axis + 1]
    return places


def _largest_move(along: IntArray, across: IntArray, size: int) -> int:
    """How far the first or last place across moves per step along, at most; at least 1."""
    first, last = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    np.minimum.at(first, along, across)
    np.maximum.at(last, along, across)
    seen = last >= 0
    moves = np.abs(np.concatenate([np.diff(first[seen]), np.diff(last[seen])]))
    return max(int(moves.max(initial=1)), 1)


def is_shift_invariant(program: Program, grids: Grids, steps: list[IntArray]) -> bool:
    """Whether every matrix and constraint agrees with itself moved by one period along each axis."""
    count = len(program.constraints)
    u_steps, z_steps = steps[1 : count + 2], [steps[0], *steps[count + 2 :]]
    z_grids = (grids.x, *grids.z)
    axes = range(len(grids.x) - 1)
    for axis in axes:  # constraints first: they are small, and differ where slopes are those of a box
        for k, constraint in enumerate(program.constraints, start=1):
            values = constraint.per_entry().reshape(-1, *grids.z[k - 1])
            moved = int(z_steps[k][axis])
            length = values.shape[2 + axis]
            if moved < length and not np.array_equal(
                np.take(values, np.arange(moved, length), axis=2 + axis),
                np.take(values, np.arange(length - moved), axis=2 + axis),
            ):
                return False
            pattern = getattr(constraint, "pattern", None)
            if pattern is not None and not _agrees(
                pattern, grids.z[k - 1], grids.u[k - 1], axis, moved, int(u_steps[k - 1][axis])
            ):
                return False
    for axis in axes:
        for k, terms in enumerate(program.reads):
            for i, A in terms.items():
                if not _agrees(A, grids.u[k], z_grids[i], axis, int(u_steps[k][axis]), int(z_steps[i][axis])):
                    return False
    return True


def _agrees(A: Matrix, rows: Grid, columns: Grid, axis: int, down: int, right: int) -> bool:
    """Whether A[r, c] = A[r moved, c moved] wherever both places are inside."""
    entries = sparse.csr_array(A).tocoo()
    row_unit, column_unit = math.prod(rows[axis + 2 :]), math.prod(columns[axis + 2 :])
    row_place, column_place = _places(rows, axis), _places(columns, axis)
    first = (row_place + down < rows[axis + 1])[entries.row] & (column_place + right < columns[axis + 1])[entries.col]
    second = (row_place >= down)[entries.row] & (column_place >= right)[entries.col]
    return (
        np.array_equal(entries.row[first] + down * row_unit, entries.row[second])
        and np.array_equal(entries.col[first] + right * column_unit, entries.col[second])
        and np.array_equal(entries.data[first], entries.data[second])
    )


def _boxes(grids: Grids, footprint: Footprint) -> list[tuple[IntArray, IntArray] | None]:
    """Least and largest place per axis, of the input, all u, all z."""
    boxes: list[tuple[IntArray, IntArray] | None] = []
    for grid, part in zip(grids.all, (footprint.kept[0], *footprint.rows, *footprint.kept[1:]), strict=True):
        if part.size == 0:
            boxes.append(None)
            continue
        places = np.stack(np.unravel_index(part, grid), axis=1)[:, 1:]
        boxes.append((places.min(axis=0), places.max(axis=0)))
    return boxes


def _fits(grids: Grids, boxes: list[tuple[IntArray, IntArray] | None], steps: list[IntArray], shift: IntArray) -> bool:
    """Whether everything stays inside its grid when moved by `shift` periods."""
    for grid, box, step in zip(grids.all, boxes, steps, strict=True):
        if box is None:
            continue
        moved = shift * step
        if (box[0] + moved < 0).any() or (box[1] + moved >= np.array(grid[1:])).any():
            return False
    return True
