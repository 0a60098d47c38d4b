"""A head as a network of knots: what its nonlinear operators read, as merged linear maps of what others wrote.

Letters: source 0 is the input x; source k > 0 is the output z_k of knot k. Knot k reads u_k = Σ_i A_ki·z_i (+ constant)
over sources i < k; the head returns y = Σ_i A_yi·z_i (+ constant). For a pair of inputs write δv for v(x) − v(x').
 Activation with slopes in [a, b]: δz = D·δu for a diagonal D with entries in [a, b], that of the secants of this pair;
 any other knot: ‖δz‖_s ≤ T[r][s]·‖δu‖_r for every r and s.
With c = (a + b)/2 and h = (b − a)/2, δz = c∘δu + e with |e| ≤ h∘|δu|. Jumps are no part of δ here: `norm_dp` keeps them
apart in the slack, and its argument leaves δ as that of the continuous network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from sensitivity.capturing.recording import INPUT, Node, Recording, Ref
from sensitivity.composing.linear_map import (
    MAX_ENTRIES,
    LinearMap,
    TooLargeError,
    Work,
    identity,
    merged,
    require_ordinary,
    scaled_columns,
    summed,
    transpose,
)
from sensitivity.composing.matrices import matrix_of
from sensitivity.norms import NormTable
from sensitivity.operators.elementwise import constant_multipliers
from sensitivity.operators.pooling_rules import MAXIMA, maximum_pattern
from sensitivity.operators.slopes import slope_range
from sensitivity.rounding import FloatArray

ENTRY_FLOPS = 100.0  # work that one entry of an operator's matrix stands for
Slopes = dict[int, tuple[FloatArray, FloatArray]]


@dataclass(frozen=True, kw_only=True)
class Knot:
    """A nonlinear operator.

    Attributes:
        index: of its node in the recording.
        reads: source → map; their sum is what it reads.
        size: entries that it reads.
        low: least slope per entry, or None if it is no activation.
        high: largest slope per entry, or None.
        table: its norm table.
        windows: ones where an output is the largest (or least) of some entries, or None.
        shape_read: of what it reads, per record.
        shape_written: of what it writes.
    """

    index: int
    reads: dict[int, LinearMap]
    size: int
    low: FloatArray | None
    high: FloatArray | None
    table: NormTable
    shape_read: tuple[int, ...]
    shape_written: tuple[int, ...]
    windows: sparse.csr_array | None = None

    @property
    def centre(self) -> FloatArray | None:
        """C = (a + b)/2 per entry, rounded; `half` makes up for the rounding."""
        return None if self.low is None or self.high is None else (self.low + self.high) / 2.0

    @property
    def half(self) -> FloatArray | None:
        """The least h with [a, b] inside c ± h, rounded up."""
        if self.low is None or self.high is None or self.centre is None:
            return None
        width: FloatArray = np.maximum(self.high - self.centre, self.centre - self.low)
        return np.where(width == 0.0, 0.0, np.nextafter(width * (1.0 + 2.0**-51), np.inf))

    @property
    def steepest(self) -> FloatArray | None:
        """max(|a|, |b|) per entry."""
        return None if self.low is None or self.high is None else np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(frozen=True, kw_only=True)
class Network:
    """A head as knots; see the module's text.

    Attributes:
        num_in: entries of one input.
        num_out: entries of one output.
        knots: in order; knot k is knots[k − 1] and reads sources below k.
        output: source → map.
        shape_in: of one input.
        shape_out: of one output.
    """

    num_in: int
    num_out: int
    knots: tuple[Knot, ...]
    output: dict[int, LinearMap]
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]


def build_network(recording: Recording, *, tables: dict[int, NormTable], joint: dict[int, str], work: Work) -> Network:
    """Merge the linear operators of a recording.

    Args:
        recording: the head.
        tables: norm table of every operator that is no sum or concatenation, by node, as `norm_dp` found them.
        joint: activations that consist of several operators, by node, with their names.
        work: what merging may cost.

    Returns:
        The network, with slopes that hold over all inputs.

    Raises:
        TooLargeError: if a map would be too large or the work is spent.

    Guarantee: for every pair of inputs the network's relations hold for the recorded operators in exact arithmetic,
        with every matrix off by at most its error.
    """
    nodes = recording.nodes
    depth = len(recording.reachable())
    terms: dict[int, dict[int, LinearMap]] = {}
    knots: list[Knot] = []
    for index in recording.reachable():
        node = nodes[index]
        size = math.prod(node.shape[1:])
        if node.op == INPUT:
            terms[index] = {0: identity(size)}
        elif index in joint:
            data = node.args[0].index
            shape = node.shape[1:]
            knots.append(
                Knot(
                    index=index,
                    reads=terms[data],
                    size=size,
                    low=np.zeros(size),
                    high=np.ones(size),
                    table=tables[index],
                    shape_read=shape,
                    shape_written=shape,
                )
            )
            terms[index] = {len(knots): identity(size)}
        elif node.op in ("add", "sub", "rsub"):
            terms[index] = _summed(node, terms, work)
        elif node.op in ("cat", "stack"):
            terms[index] = _concatenated(node, nodes, terms)
        else:
            source = nodes[node.parents[0]]
            read = terms[node.parents[0]]
            matrix = matrix_of(node, source=source, max_entries=int(min(MAX_ENTRIES, work.flops / ENTRY_FLOPS)))
            if matrix is not None:
                require_ordinary(matrix.matrix, depth=depth)
                work.spend(ENTRY_FLOPS * matrix.matrix.nnz)
                operator = replace(matrix, table=tables[index], is_product=False)
                terms[index] = {i: merged(operator, A, work=work) for i, A in read.items()}
            else:
                knots.append(_knot(index, node, source, read, table=tables[index]))
                terms[index] = {len(knots): identity(size)}
    return _pruned(
        Network(
            num_in=math.prod(nodes[0].shape[1:]),
            num_out=math.prod(nodes[recording.output].shape[1:]),
            knots=tuple(knots),
            output=terms[recording.output],
            shape_in=nodes[0].shape[1:],
            shape_out=nodes[recording.output].shape[1:],
        )
    )


def transposed(network: Network) -> Network | None:
    """The network of the transposed secant matrices, or None if a knot is no activation.

    Guarantee: for every choice of secants D within the slopes, its matrix is the transpose of this network's.
    """
    count = len(network.knots)
    if any(knot.low is None for knot in network.knots):
        return None
    readers: dict[int, dict[int, LinearMap]] = {i: {} for i in range(count + 1)}
    for k, knot in enumerate(network.knots, start=1):
        for i, A in knot.reads.items():
            readers[i][count + 1 - k] = transpose(A)
    for i, A in network.output.items():
        readers[i][0] = transpose(A)
    knots = tuple(
        replace(
            knot,
            reads=dict(sorted(readers[k].items())),
            shape_read=knot.shape_written,
            shape_written=knot.shape_read,
        )
        for k, knot in reversed(list(enumerate(network.knots, start=1)))
    )
    return Network(
        num_in=network.num_out,
        num_out=network.num_in,
        knots=knots,
        output=dict(sorted(readers[0].items())),
        shape_in=network.shape_out,
        shape_out=network.shape_in,
    )


def with_slopes(network: Network, slopes: Slopes) -> Network:
    """The network with other slopes, as they hold over a box of inputs.

    Args:
        network: from `build_network`.
        slopes: (least, largest) slope per entry, by node of the recording; nodes that are no knot are left out.

    Returns:
        The network, its maps the same; the very one that was given where no slope differs.
    """
    knots = []
    for knot in network.knots:
        low, high = slopes.get(knot.index, (None, None))
        if low is None or high is None or (_are_equal(low, knot.low) and _are_equal(high, knot.high)):
            knots.append(knot)
        else:
            knots.append(replace(knot, low=low, high=high))
    if all(ours is theirs for ours, theirs in zip(knots, network.knots, strict=True)):
        return network
    return replace(network, knots=tuple(knots))


def _are_equal(new: FloatArray, old: FloatArray | None) -> bool:
    return old is not None and np.array_equal(new, old)


def _knot(index: int, node: Node, source: Node, read: dict[int, LinearMap], *, table: NormTable) -> Knot:
    size = math.prod(source.shape[1:])
    low, high = _global_slopes(node, source) or (None, None)
    return Knot(
        index=index,
        reads=read,
        size=size,
        low=None if low is None else np.broadcast_to(low, (size,)).copy(),
        high=None if high is None else np.broadcast_to(high, (size,)).copy(),
        table=table,
        shape_read=source.shape[1:],
        shape_written=node.shape[1:],
        windows=maximum_pattern(node, source) if node.op in MAXIMA else None,
    )


def _global_slopes(node: Node, source: Node) -> tuple[FloatArray, FloatArray] | None:
    """Slopes of an activation over the reals, per entry of one record."""
    if len(node.parents) != 1 or node.shape != source.shape or not isinstance(node.args[0], Ref):
        return None
    found = slope_range(node.op, args=node.args[1:], kwargs=node.kwargs, dtype=source.dtype)
    if found is None:
        return None
    sides = []
    for side in found:
        values = np.asarray(side, dtype=np.float64)
        if values.size > 1:  # one per channel
            values = values.reshape(-1, *[1] * (len(source.shape) - 2))
        sides.append(np.broadcast_to(values, source.shape[1:]).reshape(-1))
    return sides[0], sides[1]


def _summed(node: Node, terms: dict[int, dict[int, LinearMap]], work: Work) -> dict[int, LinearMap]:
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    candidates = constant_multipliers(alpha, dtype=node.dtype, divide=False)
    sign = -1.0 if alpha < 0 else 1.0
    factor = sign * float(candidates[0])
    if node.op == "sub":
        factors = (1.0, -factor)
    elif node.op == "rsub":
        factors = (-factor, 1.0)
    else:
        factors = (1.0, factor)
    if factor != alpha:
        raise TooLargeError(f"the multiplier {alpha} may act as its cast")
    found: dict[int, LinearMap] = {}
    for term, scale in zip(node.args[:2], factors, strict=True):
        if isinstance(term, Ref):
            for i, A in terms[term.index].items():
                moved = A if scale == 1.0 else scaled_columns(A, np.full(A.matrix.shape[1], scale))
                found[i] = summed(found[i], moved) if i in found else moved
    return dict(sorted(found.items()))


def _concatenated(node: Node, nodes: tuple[Node, ...], terms: dict[int, dict[int, LinearMap]]) -> dict[int, LinearMap]:
    """Rows of every branch put where its entries land in the result."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(node.shape)
    axis = dim % rank - 1
    positions = np.arange(math.prod(node.shape[1:])).reshape(node.shape[1:])
    start, found = 0, dict[int, LinearMap]()
    for term in node.args[0]:
        shape = nodes[term.index].shape[1:] if isinstance(term, Ref) else tuple(term.shape[1:])
        length = 1 if node.op == "stack" else shape[axis]
        place = np.take(positions, np.arange(start, start + length), axis=axis).reshape(-1)
        start += length
        if not isinstance(term, Ref):
            continue
        rows = sparse.csr_array(
            (np.ones(place.size), (place, np.arange(place.size))), shape=(positions.size, place.size)
        )
        for i, A in terms[term.index].items():
            moved = replace(A, matrix=sparse.csr_array(rows @ A.matrix))
            found[i] = summed(found[i], moved) if i in found else moved
    return dict(sorted(found.items()))


def _pruned(network: Network) -> Network:
    """The network without knots that its output does not depend on, and without maps that are zero."""
    needed, stack = set[int](), [i for i in network.output if i > 0]
    while stack:
        k = stack.pop()
        if k not in needed:
            needed.add(k)
            stack.extend(i for i in network.knots[k - 1].reads if i > 0)
    kept = sorted(needed)
    new_number = {0: 0, **{k: position for position, k in enumerate(kept, start=1)}}

    def renumbered(reads: dict[int, LinearMap]) -> dict[int, LinearMap]:
        return {new_number[i]: A for i, A in reads.items()}

    knots = tuple(replace(network.knots[k - 1], reads=renumbered(network.knots[k - 1].reads)) for k in kept)
    return replace(network, knots=knots, output=renumbered(network.output))
