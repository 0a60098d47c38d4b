"""Interval bounds of every value of a head over a box of inputs, and the rounding error of its forward pass.

Per value of the graph and per entry: the least and largest value over the box in exact arithmetic, and a bound on how
far a forward pass in float32 or float64 may be from exact arithmetic. From these follow local slopes of activations,
the diameter of the output, and the additive slack of rounding.

Rounding model: with unit u of the element type, a sum of n products has error at most γ_n·(|A||x| + |b|), whatever its
order (Higham 2002, §3.1), errors of inputs pass through |A| or the steepest slope, and an elementwise function is taken
to be within 16 units in the last place of its result. Fast transforms (Winograd, FFT) are outside this model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse

from sensitivity.capturing.recording import INPUT, Node, Recording, Ref, map_leaves
from sensitivity.composing.linear_map import MAX_ENTRIES, TooLargeError
from sensitivity.composing.matrices import matrix_of
from sensitivity.norms import NormTable
from sensitivity.operators import normalisation, softmax
from sensitivity.operators.slopes import slope_range_on, value_range_on
from sensitivity.operators.structure import INDEXING, index_map
from sensitivity.rounding import FloatArray, gamma

ELEMENTARY_ERROR = 16.0  # units in the last place allowed for an elementwise function
WITH_CONSTANTS = ("addmm", "linear", "convolution")
SMALLEST = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}  # lost at most where a result underflows
LARGEST = {torch.float32: 2.0**120, torch.float64: 2.0**1000}
UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True, kw_only=True)
class Box:
    """An enclosure of one value of one record.

    Attributes:
        low: least value per entry; −∞ where nothing is known.
        high: largest value per entry.
        error: how far the forward pass may be from exact arithmetic, per entry.
    """

    low: FloatArray
    high: FloatArray
    error: FloatArray

    @property
    def magnitude(self) -> FloatArray:
        """Largest |value| per entry."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


def boxes_of(
    recording: Recording, *, tables: dict[int, NormTable], low: FloatArray, high: FloatArray
) -> dict[int, Box]:
    """Enclose every value of a head.

    Args:
        recording: the head.
        tables: norm table of every operator that is no sum or concatenation, by node.
        low: least input per entry of one record; −∞ allowed.
        high: largest input.

    Returns:
        A box per reachable node.

    Guarantee: for every input in the box, every value lies in its box in exact arithmetic; the forward pass in the
        head's element type is off by at most `error`, under the module's rounding model.
    """
    nodes = recording.nodes
    boxes: dict[int, Box] = {}
    for index in recording.reachable():
        node = nodes[index]
        if node.op == INPUT:
            boxes[index] = Box(low=low, high=high, error=np.zeros(low.size))
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            made = _box(node, nodes, boxes, tables.get(index))
        boxes[index] = _cleaned(made)
    return boxes


def _box(node: Node, nodes: tuple[Node, ...], boxes: dict[int, Box], table: NormTable | None) -> Box:
    unit = UNITS[node.dtype]
    if node.op in ("add", "sub", "rsub"):
        return _sum(node, nodes, boxes, unit)
    if node.op in ("cat", "stack"):
        return _joined(node, nodes, boxes)
    size = math.prod(node.shape[1:])
    if len(node.parents) != 1:
        return _unknown(size)
    source, box = nodes[node.parents[0]], boxes[node.parents[0]]
    try:
        linear = matrix_of(node, source=source, max_entries=MAX_ENTRIES)
    except TooLargeError:
        return _unknown(size)
    if linear is not None:
        return _through_linear(node, source, box, linear.matrix, linear.error, unit)
    if node.shape == source.shape and isinstance(node.args[0], Ref):
        ranges = value_range_on(node.op, **_interval_arguments(node, source, box))
        if ranges is not None and table is not None:
            low, high = (np.asarray(side, dtype=np.float64).reshape(-1) for side in ranges)
            steepest = table[2][2]
            error = box.error * steepest * (1.0 + 2.0**-40)
            made = Box(low=low, high=high, error=error)
            # Parts may cancel, as in GELU's x/2·(1 + erf): the argument's size counts beside the result's.
            extent = _finite(made.magnitude) + _finite(box.magnitude) * steepest
            own = extent * ELEMENTARY_ERROR * unit + ELEMENTARY_ERROR * SMALLEST[node.dtype]
            return Box(low=low, high=high, error=_in_range(error + own, extent, node.dtype))
    if node.op.startswith("max_pool") or node.op.startswith("adaptive_max_pool"):
        low, high, error = (_evaluated(node, source, side) for side in (box.low, box.high, box.error))
        return Box(low=low, high=high, error=error)
    for family in (normalisation, softmax):
        known = family.output_range(node, source)
        if known is not None:  # no error model: these divide by what was computed
            low, high = (np.asarray(side, dtype=np.float64).reshape(-1) for side in known)
            return Box(low=low, high=high, error=np.full(size, np.inf))
    return _unknown(size)


def _interval_arguments(node: Node, source: Node, box: Box) -> dict[str, Any]:
    """What the rules about activations on an interval take: the operator's arguments, and the interval."""
    low, high = (side.reshape(source.shape[1:]) for side in (box.low, box.high))
    return {"args": node.args[1:], "kwargs": node.kwargs, "dtype": source.dtype, "low": low, "high": high}


def _through_linear(node: Node, source: Node, box: Box, A: sparse.csr_array, error: float, unit: float) -> Box:
    constant, constant_size = _constant_part(node, source)
    magnitude = abs(A)
    most = int(np.diff(A.indptr).max(initial=0))
    middle, radius = (box.low + box.high) / 2.0, (box.high - box.low) / 2.0
    unbounded = ~(np.isfinite(middle) & np.isfinite(radius))
    middle, radius = np.where(unbounded, 0.0, middle), np.where(unbounded, 0.0, radius)
    size = magnitude @ (np.abs(middle) + radius) + constant_size
    stray = error * float(np.linalg.norm(np.abs(middle) + radius)) * (1.0 + 2.0**-40)
    wide = size * gamma(4 * most + 32) + stray
    if "batch_norm" in node.op:
        wide = wide + constant_size * 2.0**-24  # eps may act as its float32 cast
    centre = A @ middle + constant
    spread = (magnitude @ radius) * (1.0 + gamma(4 * most + 32)) + wide
    touched = (magnitude @ unbounded.astype(np.float64)) > 0.0
    low = np.where(touched, -np.inf, centre - spread)
    high = np.where(touched, np.inf, centre + spread)
    exact = node.op in INDEXING or node.op == "neg"
    own = 0.0 if exact else (2.0 * most + 10.0) * unit * (1.0 + 2.0**-10)
    below = 0.0 if exact else (most + 2.0) * SMALLEST[node.dtype]
    rounding = size * own + below + magnitude @ _finite(box.error) * (1.0 + 2.0**-10)
    infinite = (magnitude @ np.isinf(box.error).astype(np.float64)) > 0.0
    error_out = np.where(infinite | (touched & (own > 0.0)), np.inf, rounding)
    return Box(low=low, high=high, error=_in_range(error_out, size, node.dtype))


def _in_range(error: FloatArray, size: FloatArray, dtype: torch.dtype) -> FloatArray:
    """The error, or infinity where a term of this size might overflow."""
    within: FloatArray = np.where(size < LARGEST[dtype], error, np.inf)
    return within


def _constant_part(node: Node, source: Node) -> tuple[FloatArray, FloatArray]:
    """What the operator makes of a zero record, and the size of the terms that it was summed from."""
    num_out = math.prod(node.shape[1:])
    if node.op in INDEXING:
        fill = float(node.args[2]) if node.op == "constant_pad_nd" and len(node.args) > 2 else 0.0
        value = np.where(index_map(node, source) < 0, fill, 0.0) if fill != 0.0 else np.zeros(num_out)
        return value, np.abs(value) * (1.0 + 2.0**-20)
    if node.op not in WITH_CONSTANTS and "batch_norm" not in node.op:
        return np.zeros(num_out), np.zeros(num_out)
    value = _evaluated(node, source, np.zeros(math.prod(source.shape[1:])))
    size = np.abs(value)
    if "batch_norm" in node.op:
        weight, bias, mean, variance = node.args[1:5] if len(node.args) > 4 else (None,) * 4
        if mean is not None and variance is not None:
            spread = mean.double().abs() / variance.double().clamp_min(1e-300).sqrt()
            spread = spread if weight is None else spread * weight.double().abs()
            spread = spread if bias is None else spread + bias.double().abs()
            size = size + np.repeat(spread.detach().cpu().numpy(), math.prod(source.shape[2:]))
    return value, size


@torch.no_grad()
def _evaluated(node: Node, source: Node, record: FloatArray) -> FloatArray:
    """The operator itself on one record, in float64."""
    data = torch.as_tensor(record, dtype=torch.float64).reshape(source.shape[1:]).expand(source.shape).contiguous()

    def leaf_of(leaf: object) -> object:
        if isinstance(leaf, Ref):
            return data
        if isinstance(leaf, torch.Tensor):
            tensor = leaf.detach().cpu()
            return tensor.double() if tensor.is_floating_point() else tensor
        return torch.float64 if isinstance(leaf, torch.dtype) else leaf

    args, kwargs = map_leaves(leaf_of, (node.args, node.kwargs))
    packet = getattr(torch.ops.aten, node.op.split("[")[0])
    result = getattr(packet, node.overload or "default")(*args, **kwargs)
    tensor = result if isinstance(result, torch.Tensor) else result[0]
    values: FloatArray = tensor[0].reshape(-1).numpy()
    return values


def _sum(node: Node, nodes: tuple[Node, ...], boxes: dict[int, Box], unit: float) -> Box:
    alpha = float(node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1))
    factors = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[node.op]
    size = math.prod(node.shape[1:])
    low, high, error, total = np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size)
    for term, factor in zip(node.args[:2], factors, strict=True):
        if isinstance(term, Ref):
            box = boxes[term.index]
            ends = (box.low * factor, box.high * factor)
            moved = box.error * abs(factor)
        else:
            constant = torch.as_tensor(term, dtype=torch.float64).detach().cpu()
            record = constant[0] if constant.ndim == len(node.shape) else constant
            value = record.broadcast_to(node.shape[1:]).reshape(-1).numpy() * factor
            ends, moved = (value, value), np.zeros(size)
        bottom, top = np.minimum(*ends), np.maximum(*ends)
        low, high = low + bottom, high + top
        total = total + np.maximum(np.abs(bottom), np.abs(top))
        error = error + moved
    wide = np.where(np.isfinite(total), total * 2.0**-40, 0.0)
    # A Python number may act as its float32 cast.
    plain = all(isinstance(term, Ref) for term in node.args[:2]) and alpha in (1.0, -1.0)
    cast = 2.0**-22 if node.dtype == torch.float32 and not plain else 0.0
    wide = wide + np.where(np.isfinite(total), total * cast, 0.0)
    own = total * 8.0 * unit + 4.0 * SMALLEST[node.dtype]
    error_out = _in_range((error + own) * (1.0 + 2.0**-40), total, node.dtype)
    return Box(low=low - wide, high=high + wide, error=error_out)


def _joined(node: Node, nodes: tuple[Node, ...], boxes: dict[int, Box]) -> Box:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    axis = dim % len(node.shape) - 1
    parts: list[list[FloatArray]] = [[], [], []]
    for term in node.args[0]:
        if isinstance(term, Ref):
            shape, box = nodes[term.index].shape[1:], boxes[term.index]
            sides = [side.reshape(shape) for side in (box.low, box.high, box.error)]
        else:
            value = term[0].detach().cpu().double().numpy()
            sides = [value, value, np.zeros_like(value)]
        for part, side in zip(parts, sides, strict=True):
            part.append(side)
    join = np.stack if node.op == "stack" else np.concatenate
    low, high, error = (join(part, axis=axis).reshape(-1) for part in parts)
    return Box(low=low, high=high, error=error)


def _unknown(size: int) -> Box:
    return Box(low=np.full(size, -np.inf), high=np.full(size, np.inf), error=np.full(size, np.inf))


def _cleaned(box: Box) -> Box:
    """The box with infinities in place of what is undefined."""
    return Box(
        low=np.where(np.isnan(box.low), -np.inf, box.low),
        high=np.where(np.isnan(box.high), np.inf, box.high),
        error=np.where(np.isnan(box.error), np.inf, box.error),
    )


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)


def local_slopes(recording: Recording, boxes: dict[int, Box]) -> dict[int, tuple[FloatArray, FloatArray]]:
    """Least and largest slope of every activation over the box of what it reads, per entry."""
    found: dict[int, tuple[FloatArray, FloatArray]] = {}
    for index in recording.reachable():
        node = recording.nodes[index]
        if node.op == INPUT or len(node.parents) != 1 or not isinstance(node.args[0], Ref):
            continue
        source, box = recording.nodes[node.parents[0]], boxes[node.parents[0]]
        if node.shape != source.shape:
            continue
        slopes = slope_range_on(node.op, **_interval_arguments(node, source, box))
        if slopes is not None:
            low, high = (np.asarray(side, dtype=np.float64).reshape(-1) for side in slopes)
            found[index] = (low, high)
    return found
