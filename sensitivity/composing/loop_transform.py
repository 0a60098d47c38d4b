"""Bounds by loop transformation (LipLT), in every pair of norms, on every sub-chain.

δu_j = Ã_{j,0}·δx + Σ_i Ã_{j,i}·e_i with |e_i| ≤ h_i∘|δu_i| (see `network`, `linearised`), so
 B_j[s] ≤ ‖Ã_{j,0}‖_{p→s} + Σ_i min_r B_i[r]·‖Ã_{j,i}·diag(h_i)‖_{r→s}.
Where everything behind knot k reaches the input through z_k alone, the same holds with z_k in place of x, and the bound
on the way to z_k times the bound from there on is another candidate: products of layers are among these.

Source: M. Fazlyab, T. Entesari, A. Roy, R. Chellappa (2023), Certified robustness via dynamic margin maximization and
 improved Lipschitz regularization, NeurIPS, §3 (2→2, slopes in [0, 1]); here for slopes in [a, b], all norms, any graph.
"""

from __future__ import annotations

from sensitivity.composing.linearised import Linearised
from sensitivity.composing.network import Network
from sensitivity.norms import NORMS, Row, norm_index
from sensitivity.rounding import add_up, mul_up

Rows = dict[int, Row]


def loop_transformed(network: Network, maps: Linearised, *, p: float) -> Row:
    """Bounds on the output of a network.

    Args:
        network: the head.
        maps: its linearised maps.
        p: norm of the input.

    Returns:
        Bounds p→1, p→2 and p→∞, rounded up.

    Guarantee: at or above the Lipschitz constant in each norm; see the module's text.
    """
    return _Expansion(network, maps).rows(0, norm_index(p))[len(network.knots) + 1]


class _Expansion:
    """Rows of bounds on what each knot reads, from a source that everything behind it depends on alone."""

    def __init__(self, network: Network, maps: Linearised) -> None:
        self.network, self.maps = network, maps
        reads = [knot.reads for knot in network.knots] + [network.output]
        self.count = len(network.knots)
        self.cuts = [
            k
            for k in range(1, self.count + 1)
            if all(min(reads[j - 1], default=k) >= k for j in range(k + 1, self.count + 2))
        ]
        self._known: dict[tuple[int, int], Rows] = {}

    def rows(self, start: int, r: int) -> Rows:
        """For every later reader, bounds per unit of the start's norm r."""
        if (start, r) not in self._known:
            self._known[start, r] = self._rows(start, r)
        return self._known[start, r]

    def _rows(self, start: int, r: int) -> Rows:
        found: Rows = {}
        for j in range(start + 1, self.count + 2):
            candidates = [self._expanded(start, r, j, found)]
            for k in self.cuts:
                if start < k < j and k in found:
                    candidates.append(self._through_cut(found[k], k, j))
            row = [min(candidate[s] for candidate in candidates) for s in range(3)]
            found[j] = (row[0], row[1], row[2])
        return found

    def _expanded(self, start: int, r: int, j: int, found: Rows) -> Row:
        """The expansion over all knots between; e_i is the whole output where knot i is no activation."""
        terms: list[Row] = []
        first = self.maps.through.get((j, start))
        if first is not None:
            terms.append(first.table[r])
        for i in range(start + 1, j):
            through = self.maps.through.get((j, i))
            if through is None:
                continue
            knot = self.network.knots[i - 1]
            moved = found[i] if knot.half is not None else self._passed(found[i], i)
            row = [min(mul_up(moved[t], through.spread[t][s]) for t in range(3)) for s in range(3)]
            terms.append((row[0], row[1], row[2]))
        sums = [add_up(*[term[s] for term in terms]) for s in range(3)]
        return sums[0], sums[1], sums[2]

    def _passed(self, row: Row, k: int) -> Row:
        """Bounds on what knot k writes, from those on what it reads."""
        table = self.network.knots[k - 1].table
        out = [min(mul_up(row[t], table[t][s]) for t in range(3)) for s in range(3)]
        return out[0], out[1], out[2]

    def _through_cut(self, row: Row, k: int, j: int) -> Row:
        written = self._passed(row, k)
        onward = [self.rows(k, t)[j] for t in range(len(NORMS))]
        out = [min(mul_up(written[t], onward[t][s]) for t in range(3)) for s in range(3)]
        return out[0], out[1], out[2]
