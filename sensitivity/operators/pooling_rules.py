"""Rules for pooling, and for means, sums and maxima over dimensions."""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import sparse

from sensitivity.capturing.recording import Node
from sensitivity.operators.operator import Effort, Operator, Rule, refuse, require_data_first
from sensitivity.operators.pooling import (
    IntArray,
    Windows,
    adaptive_windows,
    average_pool_matrix,
    average_table,
    average_windows,
    largest_overlap,
    max_table,
    reads_padding_alone,
    reduction_table,
    window_pattern,
    windows_over_a_pixel,
)
from sensitivity.rounding import div_up

_MAX_POOLS = {
    "max_pool1d": 1,
    "max_pool2d": 2,
    "max_pool2d_with_indices": 2,
    "max_pool3d": 3,
    "max_pool3d_with_indices": 3,
}
_AVERAGE_POOLS = {"avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3}
_ADAPTIVE_AVERAGES = {"adaptive_avg_pool1d": 1, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3}
_ADAPTIVE_MAXIMA = {"adaptive_max_pool1d": 1, "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3}
_REDUCTIONS = ("mean", "sum")
_EXTREMES = ("amax", "amin", "max", "min")
AVERAGES = frozenset((*_AVERAGE_POOLS, *_ADAPTIVE_AVERAGES, *_REDUCTIONS))  # operators that `average_matrix` knows
MAXIMA = frozenset((*_MAX_POOLS, *_ADAPTIVE_MAXIMA, *_EXTREMES))  # operators that `maximum_pattern` knows


def average_matrix(node: Node, source: Node) -> sparse.csr_array:
    """The matrix of an average over each record: average pooling, adaptive average pooling, mean or sum.

    Args:
        node: an operator of `AVERAGES`.
        source: the node whose value it reads, batch first.

    Returns:
        Shape (outputs, inputs) of one record, both in flat order; each weight is 1/divisor, correctly rounded.

    Raises:
        NoBoundError: where the operator's rule would raise it.

    Guarantee: each true weight 1/divisor is within half a unit in the last place of the one given.

    Edge cases: windows that hold padding alone are empty rows.

    Example:
        >>> source = Node(op="input", shape=(13, 2, 3))
        >>> average_matrix(Node(op="sum", args=(None, [1]), shape=(13, 3)), source).toarray()
        array([[1., 0., 0., 1., 0., 0.],
               [0., 1., 0., 0., 1., 0.],
               [0., 0., 1., 0., 0., 1.]])
    """
    if node.op in _REDUCTIONS:
        columns = _reduced_entries(node, source)
        return _rows_of(columns, weight=1.0 / columns.shape[1] if node.op == "mean" else 1.0, source=source)
    return average_pool_matrix(*_average_axes(node, source), channels=source.shape[1])


def maximum_pattern(node: Node, source: Node) -> sparse.csr_array:
    """Which entries each largest or least value is taken over.

    Args:
        node: an operator of `MAXIMA`.
        source: the node whose value it reads, batch first.

    Returns:
        Ones, shape (outputs, inputs) of one record, both in flat order; padding is no entry.

    Raises:
        NoBoundError: where the operator's rule would raise it.

    Example:
        >>> source = Node(op="input", shape=(13, 1, 3))
        >>> node = Node(op="max_pool1d", args=(None, [2], [1]), shape=(13, 1, 2))
        >>> maximum_pattern(node, source).toarray()
        array([[1., 1., 0.],
               [0., 1., 1.]])
    """
    if node.op in _EXTREMES:
        return _rows_of(_reduced_entries(node, source), weight=1.0, source=source)
    if node.op in _ADAPTIVE_MAXIMA:
        sizes = _pixels(source, dims=_ADAPTIVE_MAXIMA[node.op])
        patterns = [adaptive_windows(n, m).pattern() for n, m in zip(sizes, node.shape[2:], strict=True)]
    else:
        patterns = [window_pattern(*sizes, **window) for sizes, window in _max_windows(node, source)]
    pattern = sparse.csr_array(sparse.eye_array(source.shape[1]))
    for axis in patterns:
        pattern = sparse.csr_array(sparse.kron(pattern, axis, format="csr"))
    return pattern


def _max_windows(node: Node, source: Node) -> list[tuple[tuple[int, int], dict[str, int]]]:
    """Sizes (before, after) and window of every axis of a max pool."""
    sizes = _pixels(source, dims=_MAX_POOLS[node.op])
    kernel, stride, padding, dilation = _options(node, kernel=None, stride=[], padding=0, dilation=1)
    window = _sizes(kernel, len(sizes))
    options = (window, *(_sizes(values, len(sizes)) for values in (stride or window, padding, dilation)))
    names = ("kernel", "stride", "padding", "dilation")
    return [
        ((size, node.shape[2 + axis]), dict(zip(names, (values[axis] for values in options), strict=True)))
        for axis, size in enumerate(sizes)
    ]


def _max_pool(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    axes = _max_windows(node, source)
    if any(reads_padding_alone(*sizes, **window) for sizes, window in axes):
        refuse("a window of it sees padding alone, whose largest value is −∞", "use less padding or dilation")
    return _maximum(math.prod(windows_over_a_pixel(*sizes, **window) for sizes, window in axes), node, source)


def _adaptive_max_pool(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    sizes = _pixels(source, dims=_ADAPTIVE_MAXIMA[node.op])
    overlaps = [largest_overlap(adaptive_windows(n, m)) for n, m in zip(sizes, node.shape[2:], strict=True)]
    return _maximum(math.prod(overlaps), node, source)


def _extreme(node: Node, source: Node, effort: Effort) -> Operator:
    """Largest or least value over dimensions: windows that do not overlap."""
    require_data_first(node)
    _reduced_dims(node, source)
    return _maximum(1, node, source)


def _maximum(windows: int, node: Node, source: Node) -> Operator:
    return Operator(
        kind="max_pool",
        table=max_table(windows, num_in=math.prod(source.shape[1:]), num_out=math.prod(node.shape[1:])),
    )


def _average_pool(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    return Operator(kind="avg_pool", table=average_table(*_average_axes(node, source), channels=source.shape[1]))


def _average_axes(node: Node, source: Node) -> list[Windows]:
    """Windows along each axis of an average pool."""
    if node.op in _ADAPTIVE_AVERAGES:
        sizes = _pixels(source, dims=_ADAPTIVE_AVERAGES[node.op])
        return [adaptive_windows(n, m) for n, m in zip(sizes, node.shape[2:], strict=True)]
    sizes = _pixels(source, dims=_AVERAGE_POOLS[node.op])
    kernel, stride, padding, _, include, divisor = _options(
        node, kernel=None, stride=[], padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    num_axes = len(sizes)
    window = _sizes(kernel, num_axes)
    step, pad = _sizes(stride or window, num_axes), _sizes(padding, num_axes)
    if divisor is not None and divisor <= 0:
        refuse(f"its divisor_override is {divisor}", "use a positive divisor")
    return [
        average_windows(
            sizes[axis],
            node.shape[2 + axis],
            kernel=window[axis],
            stride=step[axis],
            padding=pad[axis],
            count_include_pad=include,
            divisor=None if divisor is None else (divisor if axis == 0 else 1),
        )
        for axis in range(num_axes)
    ]


def _reduction(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    num_reduced = math.prod(source.shape[dim] for dim in _reduced_dims(node, source))
    weight = div_up(1.0, float(num_reduced)) if node.op == "mean" else 1.0
    return Operator(
        kind=node.op, table=reduction_table(weight, num_reduced=num_reduced, num_out=math.prod(node.shape[1:]))
    )


def _reduced_dims(node: Node, source: Node) -> list[int]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else []
    if not listed or any(dim % len(source.shape) == 0 for dim in listed):
        refuse("it reduces over the batch, so records mix", "name the dimensions to reduce, without the first")
    return listed


def _reduced_entries(node: Node, source: Node) -> IntArray:
    """Entries that each output of a reduction reads, shape (outputs, entries)."""
    axes = [dim % len(source.shape) - 1 for dim in _reduced_dims(node, source)]
    record = source.shape[1:]
    positions = np.arange(math.prod(record)).reshape(record)
    kept = [axis for axis in range(len(record)) if axis not in axes]
    entries: IntArray = positions.transpose([*kept, *axes]).reshape(math.prod(record[axis] for axis in kept), -1)
    return entries


def _rows_of(columns: IntArray, *, weight: float, source: Node) -> sparse.csr_array:
    """One weight at the given columns of every row."""
    num_out, length = columns.shape
    return sparse.csr_array(
        (np.full(columns.size, weight), columns.reshape(-1), np.arange(num_out + 1) * length),
        shape=(num_out, math.prod(source.shape[1:])),
    )


def _pixels(source: Node, *, dims: int) -> tuple[int, ...]:
    """Sizes of a record's axes behind its channels."""
    if len(source.shape) != dims + 2:
        refuse(
            f"pooling over records of shape {source.shape[1:]} has no bound here",
            "give each record channels and pixels",
        )
    return source.shape[2:]


def _options(node: Node, **defaults: Any) -> list[Any]:
    """Arguments after the data, by position or by name."""
    given = node.args[1:]
    return [
        given[position] if position < len(given) else node.kwargs.get(name, default)
        for position, (name, default) in enumerate(defaults.items())
    ]


def _sizes(values: Any, num_axes: int) -> list[int]:
    """One size per axis, from an argument that gives one for all or one for each."""
    listed = list(values) if isinstance(values, list | tuple) else [values]
    return listed * num_axes if len(listed) == 1 else listed


RULES: dict[str, Rule] = {
    **dict.fromkeys(_MAX_POOLS, _max_pool),
    **dict.fromkeys(_ADAPTIVE_MAXIMA, _adaptive_max_pool),
    **dict.fromkeys((*_AVERAGE_POOLS, *_ADAPTIVE_AVERAGES), _average_pool),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_EXTREMES, _extreme),
}
