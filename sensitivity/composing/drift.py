"""Recertifying a head whose weights moved a little: an old bound plus how far the head can have drifted.

For every choice of secants D (see `network`) J'(D) − J(D) is bounded through the graph: with O_v the old head's row
(norms of δv per unit of δx, over all D) and D_v that of the difference, a linear operator A' = A + ΔA gives
 D_out[s] = min_r D_in[r]·‖A'‖_{r→s} + min_r O_in[r]·‖ΔA‖_{r→s},
an activation D_out = slope·D_in, as both heads share D. Hence ‖J'(D)‖ ≤ ‖J(D)‖ + D_y ≤ old bound + D_y.
This needs every nonlinear operator to be an activation with unchanged parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from sensitivity.capturing.recording import INPUT, Node, Recording, Ref, leaves_of, map_leaves
from sensitivity.composing.matrices import batch_norm_factors
from sensitivity.norms import (
    NormTable,
    Row,
    add_rows,
    added_table,
    between_dual_bounds,
    norm_index,
    scaled_table,
    smaller_table,
)
from sensitivity.operators.activations import activation_slope
from sensitivity.operators.linear import diagonal_table
from sensitivity.operators.operator import Effort
from sensitivity.operators.rules import operator_of
from sensitivity.operators.slopes import slope_range
from sensitivity.operators.structure import INDEXING
from sensitivity.rounding import FloatArray, add_up, inflate, mul_up, norm2_up, scale_to_unit, sqrt_up
from sensitivity.spectra.dense import largest_singular_value_up
from sensitivity.spectra.symbol import polyphase

ZERO: Row = (0.0, 0.0, 0.0)
WEIGHTED = {"addmm": 2, "mm": 1, "linear": 1, "convolution": 1}
SANDWICH_FLOPS = 5e7
SANDWICH_ENTRIES = 4_000_000
STEEP = 1e100  # slopes from here on could overflow
LEAST_ENTRY = 2.0**-900  # above all that products of kernels of unit scale lose by underflow
UNWEIGHTED = ("neg", "mul", "div", "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d")
# One rounding per entry of a difference: ‖|ΔA|‖₂ ≤ 2^20·‖ΔA‖₂ for up to 2^40 columns, times 2^-53.
DIFFERENCE_SAFETY = 1.0 + 2.0**-32


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """An old bound and what it was proven for.

    Attributes:
        value: the bound, over all secants within the activations' global slopes.
        p: norm of the input.
        q: norm of the output.
        recording: the head.
        rows: for every value, bounds per unit of the input's norm, by node.
        tables: norm table of every operator with one data input, by node.
    """

    value: float
    p: float
    q: float
    recording: Recording
    rows: dict[int, Row]
    tables: dict[int, NormTable]


def drifted(
    anchor: Anchor, recording: Recording, *, tables: dict[int, NormTable], p: float, q: float, effort: Effort
) -> float | None:
    """Bound a head by an old bound plus the drift since.

    Args:
        anchor: the old bound.
        recording: the head now.
        tables: norm tables of its operators, by node; coarse ones do.
        p: norm of the input.
        q: norm of the output.
        effort: work allowed for differences of convolutions.

    Returns:
        The bound, or None where the heads differ in more than weights, or hold something that is not covered.

    Guarantee: at or above the head's Lipschitz constant p→q.
    """
    old = anchor.recording
    if (anchor.p, anchor.q) != (p, q) or old.reachable() != recording.reachable() or old.output != recording.output:
        return None
    moved: dict[int, Row] = {}
    for index in recording.reachable():
        before, now = old.nodes[index], recording.nodes[index]
        if not _same_but_weights(before, now):
            return None
        row = _moved(index, before, now, old, recording, anchor, moved, tables.get(index), effort)
        if row is None:
            return None
        moved[index] = row
    return add_up(anchor.value, moved[recording.output][norm_index(q)])


def _moved(
    index: int,
    before: Node,
    now: Node,
    old: Recording,
    recording: Recording,
    anchor: Anchor,
    moved: dict[int, Row],
    table: NormTable | None,
    effort: Effort,
) -> Row | None:
    """The row of the difference of one value."""
    if now.op == INPUT:
        return ZERO
    if now.op in ("add", "sub", "rsub"):
        return _summed(before, now, moved)
    if now.op in ("cat", "stack"):
        rows = [moved[term.index] for term in now.args[0] if isinstance(term, Ref)]
        return add_up(*[row[0] for row in rows]), norm2_up(row[1] for row in rows), max(row[2] for row in rows)
    if table is None or len(now.parents) != 1:
        return None
    source = recording.nodes[now.parents[0]]
    if now.op in WEIGHTED or "batch_norm" in now.op:
        difference = _difference_table(before, now, source, effort)
        if difference is None:
            return None
        known = anchor.tables.get(index)
        if known is not None:
            table = smaller_table(table, added_table([known, difference]))
        carried = _through(moved[now.parents[0]], table)
        fresh = _through(anchor.rows[now.parents[0]], difference)
        sandwich = _sandwich(before, _delta(before, now), old, anchor) if now.op == "convolution" else None
        if sandwich is not None:
            fresh = min(fresh[0], sandwich[0]), min(fresh[1], sandwich[1]), min(fresh[2], sandwich[2])
        return add_rows([carried, fresh])
    slope = activation_slope(now.op, args=now.args[1:], kwargs=now.kwargs, dtype=source.dtype)
    carried = _through(moved[now.parents[0]], table)
    is_fixed = slope is not None or now.op in INDEXING or now.op in UNWEIGHTED
    return carried if is_fixed and _equal_constants(before, now) else None


def _summed(before: Node, now: Node, moved: dict[int, Row]) -> Row | None:
    """Constants may move; multipliers may not."""
    alphas = [node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1) for node in (before, now)]
    if alphas[0] != alphas[1]:
        return None
    factor = abs(float(alphas[1])) * (1.0 + 2.0**-22)  # it may act as its float32 cast
    factor = 1.0 if alphas[1] in (1, -1) else factor
    factors = (factor, 1.0) if now.op == "rsub" else (1.0, factor)
    rows = [
        (mul_up(row[0], f), mul_up(row[1], f), mul_up(row[2], f))
        for term, f in zip(now.args[:2], factors, strict=True)
        if isinstance(term, Ref)
        for row in [moved[term.index]]
    ]
    return add_rows(rows)


def _through(row: Row, table: NormTable) -> Row:
    out = [min(mul_up(row[r], table[r][s]) for r in range(3)) for s in range(3)]
    return out[0], out[1], out[2]


def _difference_table(before: Node, now: Node, source: Node, effort: Effort) -> NormTable | None:
    if "batch_norm" in now.op:
        if now.args[4] is None or now.args[3] is None:
            return None
        (d_now, off_now), (d_before, off_before) = (batch_norm_factors(node, source) for node in (now, before))
        spread = np.abs(d_now - d_before) * (1.0 + 2.0**-50) + add_up(off_now, off_before)
        return diagonal_table(spread, repeats=math.prod(source.shape[2:]))
    position, delta = WEIGHTED[now.op], _delta(before, now)
    if not bool(torch.isfinite(delta).all()):
        return None
    args = tuple(delta if i == position else argument for i, argument in enumerate(now.args))
    table = operator_of(replace(now, args=args), source=source, effort=effort).table
    return _safe(table)


def _delta(before: Node, now: Node) -> torch.Tensor:
    """The difference of two weights, each entry rounded once."""
    position = WEIGHTED[now.op]
    new: torch.Tensor = now.args[position]
    old: torch.Tensor = before.args[position]
    return new.detach().cpu().double() - old.detach().cpu().double()


def sandwich_table(
    outer: FloatArray,
    inner: FloatArray,
    *,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    dilations: tuple[tuple[int, ...], tuple[int, ...]],
    slopes: tuple[float, float],
) -> NormTable:
    """Norm table that holds for outer∘D∘inner with every diagonal D of entries in [a, b], for convolutions of one group.

    Args:
        outer: float64 kernel, shape (c_out, c_between, k_1, …).
        inner: float64 kernel, shape (c_between, c_in, k_1, …), as many axes.
        strides: of the outer and of the inner convolution, per axis.
        dilations: likewise.
        slopes: a and b.

    Returns:
        The table; infinity for ∞→1, ∞→2 and 2→1.

    Raises:
        ValueError: if a kernel holds NaN or infinity.

    Guarantee: at or above each norm, for every input size and zero padding. An entry of the product is Σ d_j·o_j·i_j
        over paths j between two pixels; with P the sum of the positive and N that of the negative o_j·i_j, up to
        sign, it lies within ±max(b⁺P + a⁻N, a⁻P + b⁺N). This only shrinks where borders cut paths off, so on the
        infinite grid it makes a kernel of stride s_o·s_i, tap α of the inner and β of the outer kernel at α·d_i +
        β·d_o·s_i, whose entries dominate. Its entries are not negative, so its symbol is largest at frequency 0.

    Example:
        >>> ones = np.ones((1, 1, 2))
        >>> table = sandwich_table(ones, -ones, strides=((1,), (1,)), dilations=((1,), (1,)), slopes=(0.0, 1.0))
        >>> [round(value, 9) for value in table[0]]
        [4.0, 2.449489743, 2.0]
    """
    (outer, outer_scale), (inner, inner_scale) = scale_to_unit(outer), scale_to_unit(inner)
    c_out, c_between, *outer_taps = outer.shape
    c_in, inner_taps = inner.shape[1], inner.shape[2:]
    axes = range(len(outer_taps))
    O = np.moveaxis(outer, 1, -1).reshape(-1, c_between)  # noqa: E741
    I = inner.reshape(c_between, -1)  # noqa: E741
    O_up, O_down, I_up, I_down = np.maximum(O, 0.0), np.maximum(-O, 0.0), np.maximum(I, 0.0), np.maximum(-I, 0.0)
    shape = (c_out, *outer_taps, c_in, *inner_taps)
    P, N = (O_up @ I_up + O_down @ I_down).reshape(shape), (O_up @ I_down + O_down @ I_up).reshape(shape)
    gaps = [dilations[0][axis] * strides[1][axis] for axis in axes]
    sizes = [(outer_taps[x] - 1) * gaps[x] + (inner_taps[x] - 1) * dilations[1][x] + 1 for x in axes]
    positive, negative = np.zeros((c_out, c_in, *sizes)), np.zeros((c_out, c_in, *sizes))
    for tap in np.ndindex(*outer_taps):
        place = [
            slice(tap[x] * gaps[x], sizes[x] - (outer_taps[x] - 1 - tap[x]) * gaps[x], dilations[1][x]) for x in axes
        ]
        positive[(slice(None), slice(None), *place)] += P[(slice(None), *tap)]
        negative[(slice(None), slice(None), *place)] += N[(slice(None), *tap)]
    up, down = max(slopes[1], 0.0), max(-slopes[0], 0.0)
    dominating = np.maximum(up * positive + down * negative, down * positive + up * negative)
    dominating, own_scale = scale_to_unit(dominating + LEAST_ENTRY)  # so that no square underflows where it counts
    phases = polyphase(dominating, steps=tuple(strides[0][x] * strides[1][x] for x in axes))
    sums_of_taps = phases.reshape(*phases.shape[:2], -1).sum(axis=2)
    rows, columns = sums_of_taps.sum(axis=1), sums_of_taps.sum(axis=0)
    row_squares, column_squares = ((phases**2).sum(axis=(j, *range(2, phases.ndim))) for j in (1, 0))
    scale = mul_up(mul_up(outer_scale, inner_scale), own_scale)
    num_operations = 2 * c_between + math.prod(outer_taps) + phases.size + 16

    def bound(value: float) -> float:
        return mul_up(inflate(value, num_operations=num_operations), scale)

    spectral = min(
        bound(largest_singular_value_up(sums_of_taps)),
        between_dual_bounds(bound(float(columns.max())), bound(float(rows.max()))),
    )
    return (
        (bound(float(columns.max())), bound(sqrt_up(float(column_squares.max()))), bound(float(phases.max()))),
        (math.inf, spectral, bound(sqrt_up(float(row_squares.max())))),
        (math.inf, math.inf, bound(float(rows.max()))),
    )


def _sandwich(before: Node, delta: torch.Tensor, old: Recording, anchor: Anchor) -> Row | None:
    """‖ΔA·D·B‖ over all secants D, times the row of what B reads, where two convolutions enclose an activation."""
    activation = old.nodes[before.parents[0]]
    if len(activation.parents) != 1 or not isinstance(activation.args[0], Ref):
        return None
    inner = old.nodes[activation.parents[0]]
    if inner.op != "convolution" or inner.shape != activation.shape:
        return None
    first, last = _plain_convolution(inner), _plain_convolution(before)
    if first is None or last is None:
        return None
    slopes = slope_range(activation.op, args=activation.args[1:], kwargs=activation.kwargs, dtype=inner.dtype)
    A, B = delta.numpy(), inner.args[1].detach().cpu().double().numpy()
    if slopes is None or A.ndim != B.ndim:
        return None
    low, high = float(slopes[0].min()), float(slopes[1].max())
    reach = [(k - 1) * d * s for k, d, s in zip(A.shape[2:], last[1], first[0], strict=True)]
    reach = [far + (k - 1) * d + 1 for far, k, d in zip(reach, B.shape[2:], first[1], strict=True)]
    num_entries = A.shape[0] * B.shape[1] * math.prod(reach)
    flops = 8.0 * A.size * B.size / A.shape[1]
    if flops > SANDWICH_FLOPS or num_entries > SANDWICH_ENTRIES or not max(-low, high) < STEEP:
        return None
    table = sandwich_table(A, B, strides=(last[0], first[0]), dilations=(last[1], first[1]), slopes=(low, high))
    return _through(anchor.rows[inner.parents[0]], _safe(table))


def _plain_convolution(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Stride and dilation per axis; None for transposed or grouped convolutions and other data."""
    stride, dilation = node.args[3], node.args[5]
    axes = node.args[1].ndim - 2
    if node.args[6] or node.args[8] != 1 or not isinstance(node.args[0], Ref) or axes < 1:
        return None
    return tuple(stride) * (axes if len(stride) == 1 else 1), tuple(dilation) * (axes if len(dilation) == 1 else 1)


def _safe(table: NormTable) -> NormTable:
    """Norms of a computed difference as norms of the true one."""
    return scaled_table(table, DIFFERENCE_SAFETY)


def _same_but_weights(before: Node, now: Node) -> bool:
    """Whether two nodes differ at most in the values of floating-point constants."""
    if (before.op, before.overload, before.parents, before.shape, before.dtype) != (
        now.op,
        now.overload,
        now.parents,
        now.shape,
        now.dtype,
    ):
        return False
    first, second = (_without_values(node) for node in (before, now))
    return bool(first == second)


def _without_values(node: Node) -> object:
    def leaf_of(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point():
            return tuple(leaf.shape), leaf.dtype
        return tuple(leaf.shape), leaf.dtype, tuple(leaf.reshape(-1).tolist())

    return map_leaves(leaf_of, (node.args, node.kwargs))


def _equal_constants(before: Node, now: Node) -> bool:
    pairs = zip(leaves_of((before.args, before.kwargs)), leaves_of((now.args, now.kwargs)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
