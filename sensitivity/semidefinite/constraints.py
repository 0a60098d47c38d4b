"""What a nonlinear operator guarantees for a pair of inputs, as quadratic constraints on its differences.

Letters: u the difference of what the operator reads, z that of what it writes. Each constraint says that z lies in a
ball around C·u whose radius is a seminorm ρ of u, entry by entry or as a whole:
 slopes in [a, b]:   (z_o − a·u_o)(z_o − b·u_o) ≤ 0                   C = (a + b)/2, ρ = (b − a)/2·|u_o|
 largest of a window W of k entries: z_o is a mean of the u_w, so with ū their plain mean
                     (z_o − ū)² ≤ (1 − 1/k)·Σ_w (u_w − ū)²            C takes the mean
 2-norm factor L:    ‖z‖² ≤ L²·‖u‖²                                   C = 0, one ball for all entries
A weighted mean z = Σ d_w·u_w has z − ū = Σ (d_w − 1/k)(u_w − ū), and Σ (d_w − 1/k)² ≤ 1 − 1/k on the simplex, which
gives the second line by Cauchy–Schwarz; that the difference of two maxima is such a mean is the mean value theorem.

Every constraint offers its lifted form (vectors in place of numbers, for `lifting`) and its quadratic form (for
`response`): Σ_o m_o·(the constraint's left side minus its right side), for multipliers m ≥ 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy import sparse

from sensitivity.rounding import FloatArray

LEAST_WIDTH = 1e-5  # slopes closer than this share of the knot's steepest are pulled apart: equality has no multiplier
LEAST_SLOPE = 2.0**-100  # smaller slopes are widened to this or to 0: their products would underflow
LEAST_REACH = (
    1e-6  # share of the knot's largest radius below which an entry counts as that: dead units need no exact one
)
LEAST_RADIUS = 1e-10  # share of ‖u‖² that a window's squared radius has at least, for the same reason
TINY = 1e-200
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Σ z_o²·own_o + 2·Σ_o cross_o·z_o·(C·u)_o + Σ_i weights_i·(B·u)_i² over the products (B, weights); B None is I.

    Attributes:
        own: shape (outputs,).
        cross: shape (outputs,), or None for no such term.
        C: maps u to one number per output; None is the identity.
        products: pairs (B, weights).
    """

    own: FloatArray
    cross: FloatArray | None
    C: sparse.csr_array | None
    products: tuple[tuple[sparse.csr_array | None, FloatArray], ...]


class Constraint(Protocol):
    """See the module's text."""

    @property
    def size(self) -> int:
        """Entries that the operator writes."""

    @property
    def num_read(self) -> int:
        """Entries that the operator reads."""

    @property
    def may_vanish(self) -> bool:
        """Whether every entry of z may be 0 whatever u is."""

    def lifted(self, U: FloatArray, directions: FloatArray) -> FloatArray:
        """The point of the ball in unit directions, row by row."""

    def directed(self, V: FloatArray) -> FloatArray:
        """Unit directions along V, one per ball."""

    def pulled_back(self, U: FloatArray, G: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """For a gradient G in z: unit directions, the gradient in u, and multipliers."""

    def form(self, multipliers: FloatArray) -> Form:
        """The quadratic form."""

    def reached(self, read: IntArray) -> IntArray:
        """Entries of z that can differ from 0 when these entries of u do."""

    def restricted(self, written: IntArray, read: IntArray) -> Constraint:
        """The constraint on some entries, where all others of u are 0."""

    def vanishing(self) -> Constraint:
        """A weaker constraint that every z within this one and z = 0 satisfy, the same everywhere where it can be."""

    def per_entry(self) -> FloatArray:
        """Numbers of each entry that a shift of the grid must leave alone, shape (…, size)."""


def row_lengths(V: FloatArray) -> FloatArray:
    """Euclidean length of every row."""
    lengths: FloatArray = np.sqrt(np.einsum("ij,ij->i", V, V))
    return lengths


def unit_rows(V: FloatArray, lengths: FloatArray) -> FloatArray:
    """Rows divided by their lengths."""
    return V / np.maximum(lengths, TINY)[:, None]


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """Entry by entry, slopes between low and high."""

    low: FloatArray
    high: FloatArray

    @property
    def size(self) -> int:
        """Entries."""
        return self.low.size

    @property
    def num_read(self) -> int:
        """Entries."""
        return self.low.size

    @property
    def may_vanish(self) -> bool:
        """Whether 0 is among the slopes everywhere."""
        return bool((self.low <= 0.0).all() and (self.high >= 0.0).all())

    def widened(self) -> Slopes:
        """Intervals around those given that have some least width and no ends that are tiny but not 0."""
        low, high = self.low, self.high
        low = np.where(
            (low > 0.0) & (low < LEAST_SLOPE), 0.0, np.where((low < 0.0) & (low > -LEAST_SLOPE), -LEAST_SLOPE, low)
        )
        high = np.where(
            (high < 0.0) & (high > -LEAST_SLOPE), 0.0, np.where((high > 0.0) & (high < LEAST_SLOPE), LEAST_SLOPE, high)
        )
        return Slopes(low=low, high=high)._apart()

    def _apart(self) -> Slopes:
        steepest = float(np.maximum(np.abs(self.low), np.abs(self.high)).max(initial=LEAST_SLOPE))
        missing = np.maximum(LEAST_WIDTH * steepest - (self.high - self.low), 0.0)
        return Slopes(low=self.low - missing, high=self.high + missing)

    def lifted(self, U: FloatArray, directions: FloatArray) -> FloatArray:
        """C·u + ρ·direction."""
        half = (self.high - self.low) / 2.0
        point: FloatArray = ((self.low + self.high) / 2.0)[:, None] * U + (half * row_lengths(U))[:, None] * directions
        return point

    def directed(self, V: FloatArray) -> FloatArray:
        """Row by row."""
        return unit_rows(V, row_lengths(V))

    def pulled_back(self, U: FloatArray, G: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Directions G/‖G‖; multipliers ‖G‖/(2ρ), from the stationarity of the Lagrangian in z."""
        half = (self.high - self.low) / 2.0
        pull, reach = row_lengths(G), row_lengths(U)
        reach = np.maximum(reach, LEAST_REACH * reach.max(initial=TINY))
        back: FloatArray = ((self.low + self.high) / 2.0)[:, None] * G + (half * pull / reach)[:, None] * U
        return unit_rows(G, pull), back, pull / (2.0 * half * reach)

    def form(self, multipliers: FloatArray) -> Form:
        """M·z² − m(a + b)·z·u + m·a·b·u²."""
        between = self.low * self.high * multipliers
        return Form(
            own=multipliers,
            cross=-multipliers * (self.low + self.high) / 2.0,
            C=None,
            products=((None, between),) if bool(between.any()) else (),
        )

    def reached(self, read: IntArray) -> IntArray:
        """The same entries."""
        return read

    def vanishing(self) -> Slopes:
        """0 among the slopes."""
        return Slopes(low=np.minimum(self.low, 0.0), high=np.maximum(self.high, 0.0))

    def per_entry(self) -> FloatArray:
        """Both slopes."""
        return np.stack([self.low, self.high])

    def restricted(self, written: IntArray, read: IntArray) -> Slopes:
        """Some entries; `written` and `read` are the same."""
        return Slopes(low=self.low[written], high=self.high[written])


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The largest (or any mean) of the entries that a row of `pattern` marks.

    Attributes:
        pattern: ones, shape (outputs, inputs).
        counts: entries of each window, those that are fixed at 0 and left out of `pattern` included.
    """

    pattern: sparse.csr_array
    counts: FloatArray

    @property
    def size(self) -> int:
        """Windows."""
        return int(self.pattern.shape[0])

    @property
    def num_read(self) -> int:
        """Entries below the windows."""
        return int(self.pattern.shape[1])

    @property
    def may_vanish(self) -> bool:
        """Whether every window has an entry to spare, which is 0; a mean of equal entries is none."""
        return bool((np.diff(self.pattern.indptr) < self.counts).all())

    @cached_property
    def mean(self) -> sparse.csr_array:
        """The plain mean of each window."""
        return sparse.csr_array(sparse.diags_array(1.0 / self.counts, format="csr") @ self.pattern)

    def lifted(self, U: FloatArray, directions: FloatArray) -> FloatArray:
        """C·u + ρ·direction."""
        point: FloatArray = self.mean @ U + self._radii(U)[:, None] * directions
        return point

    @cached_property
    def _turned(self) -> tuple[sparse.csr_array, sparse.csr_array]:
        """Transposes of the pattern and of the mean."""
        return sparse.csr_array(self.pattern.T), sparse.csr_array(self.mean.T)

    def directed(self, V: FloatArray) -> FloatArray:
        """Row by row."""
        return unit_rows(V, row_lengths(V))

    def pulled_back(self, U: FloatArray, G: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """As for slopes; ∂ρ/∂u_w = (1 − 1/k)(u_w − ū)/ρ."""
        pull, radii = row_lengths(G), self._radii(U)
        radii = np.maximum(radii, LEAST_REACH * radii.max(initial=TINY))
        below, spread_out = self._turned
        strength = pull * (1.0 - 1.0 / self.counts) / radii
        spread = (below @ strength)[:, None] * U - below @ (strength[:, None] * (self.mean @ U))
        return unit_rows(G, pull), spread_out @ G + spread, pull / (2.0 * radii)

    def form(self, multipliers: FloatArray) -> Form:
        """M·(z² − 2zū + k·ū² − (1 − 1/k + least)·Σ u_w²)."""
        # The margin exceeds the roundings of the sum, and more of it only weakens the constraint.
        taken = self.pattern.T @ (multipliers * (1.0 - 1.0 / self.counts + LEAST_RADIUS)) * (1.0 + 2.0**-40)
        return Form(
            own=multipliers,
            cross=-multipliers,
            C=self.mean,
            products=((self.mean, multipliers * self.counts), (None, -taken)),
        )

    def reached(self, read: IntArray) -> IntArray:
        """Windows that hold one of these entries."""
        marked = np.zeros(self.num_read)
        marked[read] = 1.0
        reached: IntArray = np.flatnonzero(self.pattern @ marked)
        return reached

    def vanishing(self) -> Windows:
        """Windows of one size with an entry more, which is 0."""
        return Windows(pattern=self.pattern, counts=np.full(self.counts.shape, self.counts.max(initial=0.0) + 1.0))

    def per_entry(self) -> FloatArray:
        """Counts."""
        return self.counts[None]

    def restricted(self, written: IntArray, read: IntArray) -> Windows:
        """Some windows; what they lose is 0 and still counts."""
        return Windows(pattern=sparse.csr_array(self.pattern[written][:, read]), counts=self.counts[written])

    def _radii(self, U: FloatArray) -> FloatArray:
        squares = np.einsum("ij,ij->i", U, U)
        mean = self.mean @ U
        spread = self.pattern @ squares - self.counts * np.einsum("ij,ij->i", mean, mean)
        kept = (1.0 - 1.0 / self.counts) * np.maximum(spread, 0.0) + LEAST_RADIUS * (self.pattern @ squares)
        radii: FloatArray = np.sqrt(kept)
        return radii


@dataclass(frozen=True, kw_only=True)
class WholeNorm:
    """‖z‖₂ ≤ factor·‖u‖₂.

    Attributes:
        factor: the largest ratio of 2-norms, above 0.
        size: entries that the operator writes.
        num_read: entries that it reads.
    """

    factor: float
    size: int
    num_read: int

    @property
    def may_vanish(self) -> bool:
        """The ball holds 0."""
        return True

    def lifted(self, U: FloatArray, directions: FloatArray) -> FloatArray:
        """The whole of the directions, scaled to length factor·‖u‖."""
        length = max(float(np.linalg.norm(directions)), TINY)
        point: FloatArray = directions * (self.factor * float(np.linalg.norm(U)) / length)
        return point

    def directed(self, V: FloatArray) -> FloatArray:
        """All rows as one."""
        return V / max(float(np.linalg.norm(V)), TINY)

    def pulled_back(self, U: FloatArray, G: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """One multiplier for all entries."""
        pull, reach = float(np.linalg.norm(G)), max(float(np.linalg.norm(U)), TINY)
        multiplier = np.full(self.size, pull / (2.0 * self.factor * reach))
        return G / max(pull, TINY), (self.factor * pull / reach) * U, multiplier

    def form(self, multipliers: FloatArray) -> Form:
        """M·(‖z‖² − L²·‖u‖²), m the least of the multipliers, which all are the same."""
        least = float(multipliers.min()) if multipliers.size else 1.0
        # The margin exceeds the roundings of the product, and more of it only weakens the constraint.
        taken = np.full(self.num_read, -least * self.factor * self.factor * (1.0 + 2.0**-48))
        return Form(own=np.full(self.size, least), cross=None, C=None, products=((None, taken),))

    def reached(self, read: IntArray) -> IntArray:
        """All of them."""
        return np.arange(self.size if read.size else 0)

    def vanishing(self) -> WholeNorm:
        """The same: its ball holds 0."""
        return self

    def per_entry(self) -> FloatArray:
        """Nothing: it has one number for all."""
        return np.zeros((0, self.size))

    def restricted(self, written: IntArray, read: IntArray) -> WholeNorm:
        """The same, of fewer entries."""
        return WholeNorm(factor=self.factor, size=written.size, num_read=read.size)
