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
from sensitivity.norms import NormTable, Row, add_rows, norm_index
from sensitivity.operators.activations import activation_slope
from sensitivity.operators.linear import diagonal_table
from sensitivity.operators.operator import Effort
from sensitivity.operators.rules import operator_of
from sensitivity.operators.structure import INDEXING
from sensitivity.rounding import add_up, mul_up, norm2_up

ZERO: Row = (0.0, 0.0, 0.0)
WEIGHTED = {"addmm": 2, "mm": 1, "linear": 1, "convolution": 1}
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
    """

    value: float
    p: float
    q: float
    recording: Recording
    rows: dict[int, Row]


def drifted(
    anchor: Anchor, recording: Recording, *, tables: dict[int, NormTable], p: float, q: float, effort: Effort
) -> float | None:
    """Bound a head by an old bound plus the drift since.

    Args:
        anchor: the old bound.
        recording: the head now.
        tables: norm tables of its operators, by node.
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
        row = _moved(before, now, old, recording, anchor, moved, tables.get(index), effort)
        if row is None:
            return None
        moved[index] = row
    return add_up(anchor.value, moved[recording.output][norm_index(q)])


def _moved(
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
    carried = _through(moved[now.parents[0]], table)
    if now.op in WEIGHTED or "batch_norm" in now.op:
        difference = _difference_table(before, now, source, effort)
        if difference is None:
            return None
        return add_rows([carried, _through(anchor.rows[now.parents[0]], difference)])
    slope = activation_slope(now.op, args=now.args[1:], kwargs=now.kwargs, dtype=source.dtype)
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
    position = WEIGHTED[now.op]
    old, new = before.args[position], now.args[position]
    delta = new.detach().cpu().double() - old.detach().cpu().double()
    if not bool(torch.isfinite(delta).all()):
        return None
    args = tuple(delta if i == position else argument for i, argument in enumerate(now.args))
    table = operator_of(replace(now, args=args), source=source, effort=effort).table
    rows = [
        (mul_up(a, DIFFERENCE_SAFETY), mul_up(b, DIFFERENCE_SAFETY), mul_up(c, DIFFERENCE_SAFETY)) for a, b, c in table
    ]
    return rows[0], rows[1], rows[2]


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
