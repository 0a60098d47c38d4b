"""The best of all methods for one head: norms composed, loop transformation, columns or rows, relaxation, diameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sensitivity.capturing.recording import Recording
from sensitivity.composing.boxes import boxes_of, local_slopes
from sensitivity.composing.columns import Columns
from sensitivity.composing.linear_map import TooLargeError, Work
from sensitivity.composing.linearised import Linearised, linearise
from sensitivity.composing.loop_transform import loop_transformed
from sensitivity.composing.network import Network, Slopes, build_network, transposed, with_slopes
from sensitivity.composing.norm_dp import HeadBound
from sensitivity.composing.relaxed import relaxed
from sensitivity.norms import norm_index
from sensitivity.rounding import FloatArray, mul_up

HULL_SHARE = 0.4  # of the work on columns may go into hulls, which only tell columns that matter from others
LEAST = 1e-50  # smaller bounds are left to `norm_dp`, which is exact where numbers underflow
BOUNDED = (
    *("tanh", "sigmoid", "hardsigmoid", "hardtanh", "clamp", "atan", "sin", "cos", "erf", "softmax", "_softmax"),
    *("native_layer_norm", "native_group_norm", "instance_norm", "rms_norm"),
)
DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}


@dataclass(frozen=True, kw_only=True)
class Tightened:
    """What all methods together prove.

    Attributes:
        value: the least bound on ‖y(x) − y(x')‖_q / ‖x − x'‖_p.
        method: the method that gave it.
        diameter: the largest distance of any two outputs, or infinity.
        rounding: twice the error of the forward pass in the output norm, or None where no box is known.
    """

    value: float
    method: str
    diameter: float
    rounding: float | None


def tightened(
    recording: Recording,
    composed: HeadBound,
    *,
    p: float,
    q: float,
    box: tuple[torch.Tensor, torch.Tensor] | None,
    flops: float,
) -> Tightened:
    """Tighten a composed bound.

    Args:
        recording: the head.
        composed: what `norm_dp` found.
        p: norm of the input.
        q: norm of the output.
        box: (low, high) of the inputs, or None.
        flops: floating-point operations to spend.

    Returns:
        The least bound, its method, the diameter and the rounding.

    Guarantee: each candidate is at or above the Lipschitz constant (over the box, where one is given), so the least is.
    """
    slopes, diameter, rounding = _over_box(recording, composed, q=q, box=box)
    best, method = composed.value, "norm-dp"
    for name, value in _candidates(recording, composed, slopes, p=p, q=q, flops=flops):
        if LEAST <= value < best:
            best, method = value, name
    return Tightened(value=best, method=method, diameter=diameter, rounding=rounding)


def _over_box(
    recording: Recording, composed: HeadBound, *, q: float, box: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[Slopes, float, float | None]:
    """Local slopes, the diameter of the output and the rounding of the forward pass, twice."""
    size = math.prod(recording.nodes[0].shape[1:])
    if box is None and not any(recording.nodes[index].op in BOUNDED for index in recording.reachable()):
        return {}, math.inf, None
    if box is None:
        low, high = np.full(size, -math.inf), np.full(size, math.inf)
    else:
        low, high = (side.reshape(-1).numpy().astype(np.float64) for side in box)
    boxes = boxes_of(recording, tables=composed.tables, low=low, high=high)
    output = boxes[recording.output]
    diameter = vector_norm_up(output.high - output.low, q)
    rounding = mul_up(2.0, vector_norm_up(output.error, q))
    slopes = {} if box is None else local_slopes(recording, boxes)
    return slopes, diameter, rounding if box is not None and math.isfinite(rounding) else None


def vector_norm_up(values: FloatArray, q: float) -> float:
    """A norm of a vector, rounded up by more than its sum can err."""
    if not bool(np.isfinite(values).all()):
        return math.inf
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    exact = float(np.linalg.norm(values / largest, ord=q)) * (1.0 + (values.size + 16) * 2.0**-51)
    return mul_up(exact, largest)


def _candidates(
    recording: Recording, composed: HeadBound, slopes: Slopes, *, p: float, q: float, flops: float
) -> list[tuple[str, float]]:
    if flops <= 0.0:
        return []
    work = Work(flops=flops)
    try:
        network = build_network(recording, tables=composed.tables, joint=composed.joint, work=work)
    except TooLargeError:
        return []
    # Slopes per entry can spoil what equal slopes share, so both are tried. A box that changes none of them leaves the
    # network as it is, and all that follows depends on the network and on the work left alone: it would come out equal.
    local, left = with_slopes(network, slopes), work.flops
    found = _of_network(network, composed, p=p, q=q, work=work)
    return found if local is network else found + _of_network(local, composed, p=p, q=q, work=Work(flops=left))


def _of_network(network: Network, composed: HeadBound, *, p: float, q: float, work: Work) -> list[tuple[str, float]]:
    try:
        maps = linearise(network, work=Work(flops=work.flops / 2.0), hard=p > q)
    except TooLargeError:
        return []
    expanded = loop_transformed(network, maps, p=p)[norm_index(q)]
    found = [("loop transform", expanded)]
    if not network.knots:
        return found
    known = min(expanded, composed.value)
    if p == 1.0:
        share = Work(flops=work.flops / 2.0) if q == math.inf else work  # the rest is for rows
        found += _by_columns("columns", network, maps, q=q, known=known, work=share)
    elif q != math.inf:
        found += _relaxed(network, p=p, q=q, bounds=None, work=work)
    turned = transposed(network) if q == math.inf else None
    if turned is not None:
        turned_maps = linearise(turned, work=Work(flops=work.flops / 8.0), hard=p > q)
        found += _by_columns("rows", turned, turned_maps, q=DUAL[p], known=known, work=work)
    return found


def _by_columns(
    name: str, network: Network, maps: Linearised, *, q: float, known: float, work: Work
) -> list[tuple[str, float]]:
    """Bounds column by column, by hulls and by relaxation."""
    bounds, found = np.full(network.num_in, known), list[tuple[str, float]]()
    share = Work(flops=HULL_SHARE * work.flops)
    work.spend(share.flops)
    try:
        bounds = np.minimum(bounds, Columns(network, maps, work=share).bounds(norm_index(q)))
        found.append((name, float(bounds.max())))
    except TooLargeError:
        pass
    work.flops += share.flops  # what was left of it
    return found + (_relaxed(network, p=1.0, q=q, bounds=bounds, work=work) if q != math.inf else [])


def _relaxed(network: Network, *, p: float, q: float, bounds: FloatArray | None, work: Work) -> list[tuple[str, float]]:
    value = relaxed(network, p=p, q=q, bounds=bounds, work=work)
    return [] if value is None else [("semidefinite", value)]
