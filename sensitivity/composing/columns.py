"""Bounds for p = 1, one input coordinate at a time; the transposed network gives q = ∞.

‖J(D)‖_{1→q} is the largest q-norm of a column, so each basis vector e_i is pushed through on its own. Per column, for
what each knot reads, there are
 (a) a hull [lo, hi], entry by entry: linear maps take it by |A|, slopes in [a, b] by the extremes of d·v;
 (b) norms N[s], the least of: the hull's norm; ‖Ã_{j,0}e_i‖_s + Σ_k min_r N_k[r]·‖Ã_{j,k}diag(h_k)‖_{r→s}; the norms of
     the parts; and
 (c) for the columns that decide, the largest s-norm over the box of what the knots before wrote: with the box m ± r it
     is at most ‖[A·m, A·diag(r)]‖_{∞→s}, bounded by diagonal scaling.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from sensitivity.composing.linear_map import LinearMap, TooLargeError, Work, is_diagonal, product_cost
from sensitivity.composing.linearised import Linearised, strays
from sensitivity.composing.network import Knot, Network
from sensitivity.norms import NORMS
from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray, gamma
from sensitivity.spectra.scaling import inf_to_1_up, inf_to_2_up

SAFETY = 1.0 + 2.0**-40  # covers roundings of the few operations per entry that no γ_n below counts
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
        work: what the hulls and their refinements may cost.
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
        self._turned: dict[tuple[int, int], sparse.csr_array] = {}
        self._seen: dict[bytes, tuple[float, float]] = {}

    def largest(self, s: int) -> float:
        """The largest s-norm of a column of the output; s indexes {1, 2, ∞}.

        Guarantee: at or above the s-norm of every column of every secant matrix of the true maps: hulls and boxes are
            those of the stored maps, and `strays` is added to their norms.
        """
        bounds = self._all_norms({})[self.count + 1][s]
        best, done = bounds.copy(), set[int]()
        while s < 2 and int(best.argmax()) not in done:
            column = int(best.argmax())
            improved = self._refine(column, s)
            if improved is None:
                break
            done.add(column)
            best[column] = min(best[column], improved)
        return float(best.max())

    def _read(self, j: int) -> Hull | None:
        """Hull of what reader j reads."""
        middles, radii = [], []
        for i, A in self._reads[j - 1].items():
            hull = self.written[i]
            if hull is None:
                return None
            magnitude = _absolute(A.matrix)
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

    def _all_norms(self, refined: dict[tuple[int, int], float], column: int | None = None) -> dict[int, Norms]:
        """Norms of what every reader reads; of one column, or of all."""
        found: dict[int, Norms] = {}
        for j in range(1, self.count + 2):
            candidates: list[Norms] = [self._transformed(j, found, column)]
            parts = self._by_parts(j, found)
            if parts is not None:
                candidates.append(parts)
            hull = self.hulls[j]
            if hull is not None:
                candidates.append(self._hull_norms(j, hull, column))
            best = [np.minimum.reduce([candidate[s] for candidate in candidates]) for s in range(3)]
            for s in (0, 1):
                if (j, s) in refined:
                    best[s] = np.minimum(best[s], refined[j, s])
            best[1] = np.minimum(best[1], best[0])
            best[2] = np.minimum(best[2], best[1])
            found[j] = (best[0], best[1], best[2])
        return found

    def _hull_norms(self, j: int, hull: Hull, column: int | None) -> Norms:
        if j not in self.norms:
            self.norms[j] = column_norms(sparse.csr_array(_absolute(hull.middle) + hull.radius), error=self._strays[j])
        return _of_column(self.norms[j], column)

    def _linear_norms(self, j: int, column: int | None) -> Norms:
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
        return _of_column(self.norms[key], column)

    def _transformed(self, j: int, found: dict[int, Norms], column: int | None) -> Norms:
        """‖Ã_{j,0}e_i‖_s + Σ_k min_r N_k[r]·‖Ã_{j,k}diag(h_k)‖_{r→s}."""
        totals = [values.copy() for values in self._linear_norms(j, column)]
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

    def _refine(self, column: int, s: int) -> float | None:
        """A smaller bound on one column from the boxes of what its knots wrote; None if the work is spent."""
        refined: dict[tuple[int, int], float] = {}
        for j in range(2, self.count + 2):
            terms = self._reads[j - 1]
            if any(self.written[i] is None for i in terms) or not any(terms):
                continue
            if all(is_diagonal(A.matrix) for A in terms.values()):
                continue  # a diagonal keeps the box a box
            found = self._box_norms(j, column, s)
            if found is None:
                return None
            refined[j, 1] = found[1]
            refined[j, 0] = found[0]
        return float(self._all_norms(refined, column)[self.count + 1][s][0])

    def _box_norms(self, j: int, column: int, s: int) -> tuple[float, float] | None:
        """ℓ1 and ℓ2 norm over the box that reader j reads, for one column."""
        middles, spreads = [], []
        for i, A in self._reads[j - 1].items():
            hull = self.written[i]
            assert hull is not None
            middle, radius = _column(hull.middle, column), _column(hull.radius, column)
            touched = np.flatnonzero((middle != 0.0) | (radius != 0.0))
            local = self._transposed(j, i, A)[touched]
            middles.append((local, middle[touched]))
            spreads.append((local, radius[touched]))
        rows = np.unique(np.concatenate([local.indices for local, _ in middles]))
        if rows.size == 0:
            return 0.0, 0.0
        number = np.zeros(self._reads_size(j), dtype=np.int64)
        number[rows] = np.arange(rows.size)
        blocks, centre = [], np.zeros(rows.size)
        slack = 0.0
        for (local, m), (_, r) in zip(middles, spreads, strict=True):
            dense = np.zeros((rows.size, m.size))
            coordinates = local.tocoo()
            dense[number[coordinates.col], coordinates.row] = coordinates.data
            centre = centre + dense @ m
            slack += float(np.linalg.norm(np.abs(dense) @ np.abs(m))) * gamma(2 * m.size + 16)
            blocks.append(dense[:, r > 0.0] * r[r > 0.0])
        G = np.column_stack([centre, *blocks])
        slack += float(np.linalg.norm(np.abs(G).sum(axis=1))) * 8.0 * UNIT_ROUNDOFF  # entries of G are rounded products
        key = hashlib.blake2b(G.tobytes() + repr((G.shape, s)).encode(), digest_size=16).digest()
        if key not in self._seen:
            cost = refinement_flops(*G.shape, both=s == 0)
            if not self.work.spend(cost):
                return None
            two = inf_to_2_up(G, flops=cost)
            self._seen[key] = (inf_to_1_up(G, flops=cost) if s == 0 else math.inf), two
        one, two = self._seen[key]  # equal boxes may have been rounded differently, so the slack is no part of it
        slack, size = (slack + self._strays[j]) * SAFETY, self._reads_size(j)
        two = (two + slack) * SAFETY
        return min((one + slack * math.sqrt(size)) * SAFETY, two * math.sqrt(size) * SAFETY), two

    def _reads_size(self, j: int) -> int:
        return self.network.knots[j - 1].size if j <= self.count else self.network.num_out

    def _transposed(self, j: int, i: int, A: LinearMap) -> sparse.csr_array:
        if (j, i) not in self._turned:
            self._turned[j, i] = sparse.csr_array(A.matrix.T.tocsr())
            self._turned[j, i].sort_indices()
        return self._turned[j, i]


def refinement_flops(m: int, n: int, *, both: bool) -> float:
    """Work of bounding one box through an m×n matrix: forty steps on 24 directions, and a certificate; per norm."""
    small, large = sorted((m, n))
    certificate = 2.0 * small * small * large + 8.0 * float(small) ** 3 + 1e6
    two = certificate + 40.0 * 48.0 * min(float(n * n), 2.0 * m * n) + 2.0 * m * n * n * (n <= m)
    return two + (certificate + 40.0 * 96.0 * m * n if both else 0.0)


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


def _of_column(norms: Norms, column: int | None) -> Norms:
    """Norms of one column as arrays of one entry, or those of all."""
    if column is None:
        return norms
    one, two, top = (values[column : column + 1] for values in norms)
    return one, two, top


def _absolute(A: sparse.csr_array) -> sparse.csr_array:
    made = A.copy()
    made.data = np.abs(made.data)
    return made


def _column(A: sparse.csr_array, column: int) -> FloatArray:
    dense: FloatArray = A[:, [column]].toarray().reshape(-1)
    return dense


def _least(norms: Norms, table: tuple[tuple[float, ...], ...], s: int) -> FloatArray:
    """Min over r of N[r]·T[r][s], rounded up."""
    terms = [np.where(norms[r] == 0.0, 0.0, norms[r] * table[r][s]) for r in range(len(NORMS))]
    least: FloatArray = np.minimum.reduce(terms) * SAFETY
    return least


def _passed(norms: Norms, knot: Knot) -> Norms:
    return _least(norms, knot.table, 0), _least(norms, knot.table, 1), _least(norms, knot.table, 2)
