"""Linearised maps of a network: each activation replaced by its centre slope, with norm tables of every map.

Ã_{j,i} carries what source i adds (e_i for i > 0, see `network`) to what knot j reads, through linear operators and
centre slopes alone: Ã_{j,i} = A_{ji} + Σ_{i<k<j} A_{jk}·diag(c_k)·Ã_{k,i}. Knots that are no activations pass nothing on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sensitivity.composing.linear_map import (
    NO_BOUND,
    LinearMap,
    TooLargeError,
    Work,
    frobenius,
    merged,
    scaled_columns,
    summed,
)
from sensitivity.composing.network import Knot, Network
from sensitivity.norms import NormTable, added_table, product_table, scaled_table, smaller_table
from sensitivity.rounding import add_up, mul_up
from sensitivity.spectra.sparse import sparse_table, spectral_flops


@dataclass(frozen=True, kw_only=True)
class BoundedMap:
    """A linear map with its norm table.

    Attributes:
        map: the map, or None if it is too large to build.
        table: its norms over {1, 2, ∞}.
        spread: norms of map·diag(h) for the half widths h of an activation source; `table` for other sources.
        how: how 2→2 was certified.
    """

    map: LinearMap | None
    table: NormTable
    spread: NormTable
    how: str


@dataclass(frozen=True, kw_only=True)
class Linearised:
    """Maps of a network.

    Attributes:
        direct: (reader, source) → A; the output is reader len(knots) + 1.
        through: (reader, source) → Ã.
    """

    direct: dict[tuple[int, int], BoundedMap]
    through: dict[tuple[int, int], BoundedMap]


def linearise(network: Network, *, work: Work, hard: bool = True) -> Linearised:
    """Build and bound all maps.

    Args:
        network: the head.
        work: what it may cost; a map that does not fit is bounded by the norms of its parts.
        hard: tighten ∞→1, ∞→2 and 2→1 too, which only bounds from a larger to a smaller norm profit from.

    Returns:
        The maps.

    Guarantee: every entry of every table is at or above the norm of the true map.
    """
    reads = [knot.reads for knot in network.knots] + [network.output]
    share = work.flops / 3.0
    direct: dict[tuple[int, int], BoundedMap] = {}
    through: dict[tuple[int, int], BoundedMap] = {}
    for j, terms in enumerate(reads, start=1):
        for i, A in terms.items():
            direct[j, i] = _bounded(A, _knot(network, i), composite=NO_BOUND, share=share, work=work, hard=hard)
        for i in range(j):
            passing = [k for k in terms if k > i and (k, i) in through and network.knots[k - 1].centre is not None]
            if not passing:
                if i in terms:
                    through[j, i] = direct[j, i]
                continue
            through[j, i] = _passed_on(network, direct, through, j, i, passing, share, work, hard)
    return Linearised(direct=direct, through=through)


def _knot(network: Network, source: int) -> Knot | None:
    return network.knots[source - 1] if source > 0 else None


def _passed_on(
    network: Network,
    direct: dict[tuple[int, int], BoundedMap],
    through: dict[tuple[int, int], BoundedMap],
    j: int,
    i: int,
    passing: list[int],
    share: float,
    work: Work,
    hard: bool,
) -> BoundedMap:
    parts = [direct[j, i].table] if (j, i) in direct else []
    built: LinearMap | None = direct[j, i].map if (j, i) in direct else None
    can_build = built is not None or (j, i) not in direct
    for k in passing:
        centre = network.knots[k - 1].centre
        assert centre is not None
        outer, inner = direct[j, k], through[k, i]
        largest = float(np.abs(centre).max(initial=0.0))
        parts.append(scaled_table(product_table(outer.table, inner.table), largest))
        if not can_build or outer.map is None or inner.map is None:
            can_build = False
            continue
        try:
            made = merged(scaled_columns(outer.map, centre), inner.map, work=work)
            built = made if built is None else summed(built, made)
        except TooLargeError:
            can_build = False
    composite = added_table(parts)
    if not can_build or built is None:
        knot = _knot(network, i)
        return BoundedMap(
            map=None, table=composite, spread=_spread(None, knot, composite, share, work, hard), how="parts"
        )
    return _bounded(built, _knot(network, i), composite=composite, share=share, work=work, hard=hard)


def _bounded(
    A: LinearMap, knot: Knot | None, *, composite: NormTable, share: float, work: Work, hard: bool
) -> BoundedMap:
    allowed = min(share, work.flops)
    if not A.is_product:  # the operator's own rule has done this
        return BoundedMap(map=A, table=A.table, spread=_spread(A, knot, A.table, share, work, hard), how="operator")
    table, how = sparse_table(A.matrix, error_frobenius=A.error, flops=allowed, hard=hard)
    work.spend(min(allowed, spectral_flops(A.matrix)))
    if min(composite[1][1], A.table[1][1]) <= table[1][1]:
        how = "parts"
    table = smaller_table(table, smaller_table(composite, A.table))
    return BoundedMap(map=A, table=table, spread=_spread(A, knot, table, share, work, hard), how=how)


def _spread(
    A: LinearMap | None, knot: Knot | None, table: NormTable, share: float, work: Work, hard: bool
) -> NormTable:
    if knot is None or knot.half is None:
        return table
    half = knot.half
    largest = float(half.max(initial=0.0))
    bound = scaled_table(table, largest)
    if A is None or float(half.min(initial=largest)) == largest:
        return bound
    scaled, allowed = scaled_columns(A, half), min(share, work.flops)
    own, _ = sparse_table(scaled.matrix, error_frobenius=scaled.error, flops=allowed, hard=hard)
    work.spend(min(allowed, spectral_flops(scaled.matrix)))
    return smaller_table(own, bound)


def strays(network: Network) -> dict[int, float]:
    """How far what each reader reads may be from what it would read with the stored maps in place of the true ones.

    Args:
        network: the head.

    Returns:
        For each reader (the output is reader len(knots) + 1) a bound on ‖J_j(D) − Ĵ_j(D)‖₂.

    Guarantee: holds for every choice of secants D (of knots that are no activations: matrices of 2→2 norm within their
        table's), by induction over the knots with ‖AB − ÂB̂‖ ≤ ‖A − Â‖‖B‖ + ‖Â‖‖B − B̂‖ in 2-norms.
    """
    size: dict[int, float] = {0: 1.0}
    off: dict[int, float] = {0: 0.0}
    found: dict[int, float] = {}
    reads = [knot.reads for knot in network.knots] + [network.output]
    for j, terms in enumerate(reads, start=1):
        norms = [
            (add_up(min(frobenius(A.matrix), A.table[1][1]), A.error), A.error, size[i], off[i])
            for i, A in terms.items()
        ]  # of the true map and of the stored one alike
        found[j] = add_up(*[add_up(mul_up(error, own), mul_up(norm, moved)) for norm, error, own, moved in norms])
        if j > len(network.knots):
            break
        steepest = network.knots[j - 1].steepest
        factor = network.knots[j - 1].table[1][1] if steepest is None else float(steepest.max(initial=0.0))
        size[j] = mul_up(factor, add_up(*[mul_up(norm, own) for norm, _, own, _ in norms]))
        off[j] = mul_up(factor, found[j])
    return found
