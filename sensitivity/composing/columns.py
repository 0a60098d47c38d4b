"""Bounds for p = 1, one input coordinate at a time; the transposed network gives q = ∞.

‖J(D)‖_{1→q} is the largest q-norm of a column, so each basis vector e_i is pushed through on its own. Per column, for
what each knot reads, there are
 (a) a hull [lo, hi], entry by entry: linear maps take it by |A|, slopes in [a, b] by the extremes of d·v;
 (b) norms N[s], the least of: the hull's norm; ‖Ã_{j,0}e_i‖_s + Σ_k min_r N_k[r]·‖Ã_{j,k}diag(h_k)‖_{r→s}; the norms of
     the parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from sensitivity.composing.linear_map import TooLargeError, Work, most_entries, product_cost
from sensitivity.composing.linearised import Linearised, strays
from sensitivity.composing.network import Knot, Network
from sensitivity.norms import NORMS
from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, gamma

SAFETY = 1.0 + 2.0**-40  # covers roundings of the few operations per entry that no γ_n below counts
MAX_HULL_ENTRIES = 4_000_000  # of a product of hulls: 50 MB, and ten times that on the way
Norms = tuple[FloatArray, FloatArray, FloatArray]  # per column: ℓ1, ℓ2, ℓ∞


@dataclass(frozen=True, kw_only=True)
class Hull:
    """An entrywise enclosure middle ± radius of the columns, shape (entries, columns)."""

    middle: sparse.csr_array
    radius: sparse.csr_array


class Columns:
    """The columns of every secant matrix of a network, bounded one by one.

    Args:
        network: the head.
        maps: its linearised maps.
        work: what the hulls may cost.
    """

    def __init__(self, network: Network, maps: Linearised, *, work: Work) -> None:
        self.network, self.maps, self.work = network, maps, work
        self.count = len(network.knots)
        self._reads = [knot.reads for knot in network.knots] + [network.output]
        start = sparse.csr_array(sparse.eye_array(network.num_in, format="csr"))
        self.written: dict[int, Hull | None] = {0: Hull(middle=start, radius=sparse.csr_array(start.shape))}
        self.hulls: dict[int, Hull | None] = {}
        self.norms: dict[int, Norms] = {}
        for j in range(1, self.count + 2):
            self.hulls[j] = self._read(j)
            if j <= self.count:
                self.written[j] = self._through(j)
        self._strays = strays(network)

    def bounds(self, s: int) -> FloatArray:
        """The s-norms of the output's columns, shape (num_in,); s indexes {1, 2, ∞}.

        Guarantee: at or above the s-norm of every column of every secant matrix of the true maps: hulls are those of
            the stored maps, and `strays` is added to their norms.
        """
        return self._all_norms()[self.count + 1][s]

    def _read(self, j: int) -> Hull | None:
        """Hull of what reader j reads."""
        middles, radii = [], []
        for i, A in self._reads[j - 1].items():
            hull = self.written[i]
            if hull is None:
                return None
            magnitude = _absolute(A.matrix)
            if most_entries(A.matrix, hull.middle) + most_entries(A.matrix, hull.radius) > MAX_HULL_ENTRIES:
                raise TooLargeError("hulls of all columns")
            if not self.work.spend(40.0 * (product_cost(A.matrix, hull.middle) + product_cost(magnitude, hull.radius))):
                raise TooLargeError("hulls of all columns")
            most = gamma(int(np.diff(A.matrix.indptr).max(initial=0)) + 4)
            widened = sparse.csr_array(hull.radius * (1.0 + 4.0 * most) + _absolute(hull.middle) * (4.0 * most))
            middles.append(sparse.csr_array(A.matrix @ hull.middle))
            radii.append(sparse.csr_array(magnitude @ widened))
        middle, radius = middles[0], radii[0]
        for other, spread in zip(middles[1:], radii[1:], strict=True):
            middle = sparse.csr_array(middle + other)
            radius = sparse.csr_array(radius + spread + (_absolute(middle)) * (4.0 * UNIT_ROUNDOFF)) * SAFETY
        return Hull(middle=middle, radius=sparse.csr_array(radius))

    def _through(self, j: int) -> Hull | None:
        """Hull of what knot j writes: the extremes of d·v for slopes d in [a, b] and v in the hull."""
        knot, hull = self.network.knots[j - 1], self.hulls[j]
        if hull is None or knot.low is None or knot.high is None:
            return None
        low, high = hull.middle - hull.radius, hull.middle + hull.radius
        a, b = sparse.diags_array(knot.low, format="csr"), sparse.diags_array(knot.high, format="csr")
        products = [sparse.csr_array(d @ side) for d in (a, b) for side in (low, high)]
        top = products[0].maximum(products[1]).maximum(products[2]).maximum(products[3])
        bottom = products[0].minimum(products[1]).minimum(products[2]).minimum(products[3])
        middle = sparse.csr_array((top + bottom) * 0.5)
        outward = sparse.csr_array(_absolute(top) + _absolute(bottom)) * (2.0**-49)
        radius = sparse.csr_array((top - bottom) * 0.5 + outward)
        return Hull(middle=middle, radius=radius)

    def _all_norms(self) -> dict[int, Norms]:
        """Norms of what every reader reads."""
        found: dict[int, Norms] = {}
        for j in range(1, self.count + 2):
            candidates: list[Norms] = [self._transformed(j, found)]
            parts = self._by_parts(j, found)
            if parts is not None:
                candidates.append(parts)
            hull = self.hulls[j]
            if hull is not None:
                candidates.append(self._hull_norms(j, hull))
            best = [np.minimum.reduce([candidate[s] for candidate in candidates]) for s in range(3)]
            best[1] = np.minimum(best[1], best[0])
            best[2] = np.minimum(best[2], best[1])
            found[j] = (best[0], best[1], best[2])
        return found

    def _hull_norms(self, j: int, hull: Hull) -> Norms:
        if j not in self.norms:
            self.norms[j] = column_norms(sparse.csr_array(_absolute(hull.middle) + hull.radius), error=self._strays[j])
        return self.norms[j]

    def _linear_norms(self, j: int) -> Norms:
        key = -j
        if key not in self.norms:
            through = self.maps.through.get((j, 0))
            if through is None:
                zero = np.zeros(self.network.num_in)
                self.norms[key] = (zero, zero, zero)
            elif through.map is None:
                row = through.table[0]
                ones = np.ones(self.network.num_in)
                self.norms[key] = (row[0] * ones, row[1] * ones, row[2] * ones)
            else:
                self.norms[key] = column_norms(through.map.matrix, error=through.map.error)
        return self.norms[key]

    def _transformed(self, j: int, found: dict[int, Norms]) -> Norms:
        """‖Ã_{j,0}e_i‖_s + Σ_k min_r N_k[r]·‖Ã_{j,k}diag(h_k)‖_{r→s}."""
        totals = [values.copy() for values in self._linear_norms(j)]
        for k in range(1, j):
            through = self.maps.through.get((j, k))
            if through is None:
                continue
            knot = self.network.knots[k - 1]
            moved = found[k] if knot.half is not None else _passed(found[k], knot)
            for s in range(3):
                totals[s] = (totals[s] + _least(moved, through.spread, s)) * SAFETY
        return totals[0], totals[1], totals[2]

    def _by_parts(self, j: int, found: dict[int, Norms]) -> Norms | None:
        """Σ_i min_r N(z_i)[r]·‖A_{ji}‖_{r→s}, if the input is not read directly."""
        terms = self._reads[j - 1]
        if 0 in terms:
            return None
        totals = [np.zeros_like(found[1][0]) for _ in range(3)]
        for i in terms:
            moved = _passed(found[i], self.network.knots[i - 1])
            for s in range(3):
                totals[s] = (totals[s] + _least(moved, self.maps.direct[j, i].table, s)) * SAFETY
        return totals[0], totals[1], totals[2]


def column_norms(A: sparse.csr_array, *, error: float) -> Norms:
    """ℓ1, ℓ2 and ℓ∞ norm of every column, rounded up, of a matrix that is off by `error` in Frobenius norm."""
    m, n = A.shape
    magnitudes = np.abs(A.data)
    factor = 1.0 + 4.0 * gamma(m + 4)
    ones: FloatArray = np.bincount(A.indices, weights=magnitudes, minlength=n).astype(np.float64) * factor
    # Scaled so that no square underflows where it counts.
    scale = float(magnitudes.max(initial=0.0)) or 1.0
    squares = np.bincount(A.indices, weights=(magnitudes / scale) ** 2, minlength=n)
    twos: FloatArray = np.sqrt(squares * factor).astype(np.float64) * scale * SAFETY
    tops = np.zeros(n)
    np.maximum.at(tops, A.indices, magnitudes)
    tiny = error * SAFETY
    return ones + math.sqrt(m) * tiny * SAFETY, twos + tiny, tops + tiny


def _absolute(A: sparse.csr_array) -> sparse.csr_array:
    made = A.copy()
    made.data = np.abs(made.data)
    return made


def _least(norms: Norms, table: tuple[tuple[float, ...], ...], s: int) -> FloatArray:
    """Min over r of N[r]·T[r][s], rounded up."""
    terms = [np.where(norms[r] == 0.0, 0.0, norms[r] * table[r][s]) for r in range(len(NORMS))]
    least: FloatArray = np.minimum.reduce(terms) * SAFETY
    return least


def _passed(norms: Norms, knot: Knot) -> Norms:
    return _least(norms, knot.table, 0), _least(norms, knot.table, 1), _least(norms, knot.table, 2)
