"""Rules for pooling and for means and sums over dimensions."""

from __future__ import annotations

import math
from typing import Any

from sensitivity.capturing.recording import Node
from sensitivity.operators.operator import Effort, Operator, Rule, pair, refuse, require_data_first
from sensitivity.operators.pooling import (
    adaptive_windows,
    average_table,
    average_windows,
    max_table,
    reduction_table,
    windows_over_a_pixel,
)
from sensitivity.rounding import div_up


def _require_image(source: Node) -> tuple[int, int, int]:
    if len(source.shape) != 4:
        refuse(
            f"pooling over records of shape {source.shape[1:]} has no bound here",
            "give each record channels and pixels",
        )
    return source.shape[1], source.shape[2], source.shape[3]


def _max_pool(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    _, *sizes = _require_image(source)
    defaults: tuple[Any, ...] = ([], 0, 1)
    _, kernel, stride, padding, dilation = (*node.args[:5], *defaults[len(node.args[:5]) - 2 :])
    window = pair(kernel, (1, 1))
    step, pad, spread = pair(stride, window), pair(padding, (0, 0)), pair(dilation, (1, 1))
    windows = math.prod(
        windows_over_a_pixel(
            sizes[axis],
            node.shape[2 + axis],
            kernel=window[axis],
            stride=step[axis],
            padding=pad[axis],
            dilation=spread[axis],
        )
        for axis in (0, 1)
    )
    return Operator(
        kind="max_pool",
        table=max_table(windows, num_in=math.prod(source.shape[1:]), num_out=math.prod(node.shape[1:])),
    )


def _average_pool(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    channels, *sizes = _require_image(source)
    if node.op == "_adaptive_avg_pool2d":
        axes = [adaptive_windows(sizes[axis], node.shape[2 + axis]) for axis in (0, 1)]
        return Operator(kind="avg_pool", table=average_table(axes[0], axes[1], channels=channels))
    defaults: tuple[Any, ...] = ([], 0, False, True, None)
    _, kernel, stride, padding, _, include, divisor = (*node.args[:7], *defaults[len(node.args[:7]) - 2 :])
    window = pair(kernel, (1, 1))
    step, pad = pair(stride, window), pair(padding, (0, 0))
    if divisor is not None and divisor <= 0:
        refuse(f"its divisor_override is {divisor}", "use a positive divisor")
    axes = [
        average_windows(
            sizes[axis],
            node.shape[2 + axis],
            kernel=window[axis],
            stride=step[axis],
            padding=pad[axis],
            count_include_pad=include,
            divisor=None if divisor is None else (divisor if axis == 0 else 1),
        )
        for axis in (0, 1)
    ]
    return Operator(kind="avg_pool", table=average_table(axes[0], axes[1], channels=channels))


def _reduction(node: Node, source: Node, effort: Effort) -> Operator:
    require_data_first(node)
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or len(dims) == 0 or any(dim % len(source.shape) == 0 for dim in dims):
        refuse("it reduces over the batch, so records mix", "name the dimensions to reduce, without the first")
    num_reduced = math.prod(source.shape[dim] for dim in dims)
    weight = div_up(1.0, float(num_reduced)) if node.op == "mean" else 1.0
    return Operator(
        kind=node.op, table=reduction_table(weight, num_reduced=num_reduced, num_out=math.prod(node.shape[1:]))
    )


RULES: dict[str, Rule] = {
    "max_pool2d_with_indices": _max_pool,
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d"), _average_pool),
    **dict.fromkeys(("mean", "sum"), _reduction),
}
