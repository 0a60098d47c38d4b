"""From one recorded operator to its norm table, or to a refusal that names it.

Every rule checks that the operator keeps the batch as the first dimension and treats records one by one; what no rule
claims is refused.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from sensitivity.capturing.recording import Node, Ref, place_of
from sensitivity.errors import UnsupportedModuleError
from sensitivity.norms import NormTable, lipschitz_table
from sensitivity.operators.activations import DISCONTINUOUS, activation_slope, cast_candidates
from sensitivity.operators.conv import ConvGeometry, conv_table
from sensitivity.operators.elementwise import batch_norm_multipliers, constant_multipliers
from sensitivity.operators.linear import diagonal_table, matrix_table
from sensitivity.operators.pooling import (
    adaptive_windows,
    average_table,
    average_windows,
    max_table,
    reduction_table,
    windows_over_a_pixel,
)
from sensitivity.rounding import FloatArray, div_up

SUPPORTED = (
    "Linear, Conv1d/2d with zero padding, ReLU-like activations, Max/AvgPool, Flatten, eval Dropout and BatchNorm, "
    "sums, concatenations, and arithmetic with constants"
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work the 2→2 norm of a convolution may take.

    Attributes:
        dense_entries: build the matrix of one channel group if it has at most this many entries.
        symbol_flops: floating-point operations for the symbol bound of one convolution.
    """

    dense_entries: int
    symbol_flops: float


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Bounds on one operator with one data input.

    Attributes:
        kind: what it is, in words.
        table: norm table over {1, 2, ∞}.
        jump: additive slack per output element; 0 for continuous operators.
    """

    kind: str
    table: NormTable
    jump: float = 0.0


_EXACT_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class NoBoundError(ValueError):
    """Why an operator has no bound: a rule and a fix, to which the place is added."""


def operator_of(node: Node, *, source: Node, effort: Effort) -> Operator:
    """Bound one operator that reads one value.

    Args:
        node: the operator.
        source: the node whose value it reads.
        effort: work allowed for convolutions.

    Returns:
        Its kind, table and jump.

    Raises:
        UnsupportedModuleError: if it has no proven bound, mixes records, or moves the batch dimension.

    Guarantee: for two batches that differ in one record, that record's outputs differ by at most table[r][s]·(distance
        in norm r) + jump·(number of outputs)^{1/s}, in norm s, and no other record's outputs differ.
    """
    try:
        require_batch_first(node, source=source)
        if len(node.parents) != 1 and node.op not in ("mul", "div"):
            _refuse("it combines several values that depend on the input", f"use one of: {SUPPORTED}")
        for constant in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(constant, torch.Tensor):
                weights_as_float64(constant)
        slope = activation_slope(node.op, args=node.args[1:], kwargs=node.kwargs, dtype=source.dtype)
        if slope is not None:
            _require_elementwise(node, source)
            size = math.prod(node.shape[1:])
            return Operator(kind=node.op.strip("_"), table=lipschitz_table(slope.value, size=size), jump=slope.jump)
        rule = _RULES.get(node.op)
        if rule is None:
            fix = DISCONTINUOUS.get(node.op)
            if fix is not None:
                _refuse("it is discontinuous, so no bound exists", fix)
            _refuse("no bound is known for it", f"use one of: {SUPPORTED}")
        return rule(node, source, effort)
    except UnsupportedModuleError:
        raise
    except ValueError as error:
        raise UnsupportedModuleError(f"{place_of(node.path, node.module)} uses {node.op}: {error}") from error


def require_batch_first(node: Node, *, source: Node) -> None:
    """Refuse a value whose first dimension is not the batch, or whose element type changed.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if not node.shape or node.shape[0] != source.shape[0]:
        _refuse(
            f"it turns a batch of shape {source.shape} into {node.shape}, so records mix or the batch dimension moves",
            "keep the batch as the first dimension and treat records one by one",
        )
    if node.dtype != source.dtype:
        _refuse(
            f"it changes {source.dtype} into {node.dtype}, which rounds the values",
            "keep one element type, float32 or float64",
        )


def _refuse(rule: str, fix: str) -> NoReturn:
    raise NoBoundError(f"{rule}; {fix}")


def _require_elementwise(node: Node, source: Node) -> None:
    if not isinstance(node.args[0], Ref) or len(node.parents) != 1 or node.shape != source.shape:
        _refuse("its parameters depend on the input or change its shape", "use constant parameters")


def _require_data_first(node: Node) -> None:
    if not isinstance(node.args[0], Ref) or any(isinstance(argument, Ref) for argument in node.args[1:]):
        _refuse(
            "its weights depend on the input, or the input is on its right side", "apply constant weights to the input"
        )


def weights_as_float64(tensor: torch.Tensor) -> FloatArray:
    """Exact float64 copy of a constant tensor.

    Raises:
        NoBoundError: for element types that are not float32, float64 or integers, and for NaN or infinity.
    """
    if tensor.dtype not in _EXACT_DTYPES:
        _refuse(
            f"its weights are {tensor.dtype}, not float32, float64 or an integer type", "convert them with .float()"
        )
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    if not bool(np.isfinite(array).all()):
        _refuse("its weights hold NaN or infinity", "train again or clip the weights")
    if not tensor.is_floating_point() and bool((np.abs(array) >= 2.0**53).any()):
        _refuse("its integer weights exceed 2^53, which float64 cannot hold", "use floating-point weights")
    return array


def _linear(node: Node, source: Node, effort: Effort) -> Operator:
    """addmm(bias, x, Wᵀ), mm(x, Wᵀ) or linear(x, W, bias) on a batch of vectors."""
    if node.op == "addmm":
        bias, data, weight = node.args[:3]
        if isinstance(bias, Ref) or any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            _refuse("its bias depends on the input or is scaled", "use torch.nn.Linear")
        transposed = True
    else:
        data, weight = node.args[:2]
        transposed = node.op == "mm"
    if not isinstance(data, Ref) or isinstance(weight, Ref) or len(node.parents) != 1 or len(source.shape) != 2:
        _refuse(
            "it multiplies something other than a batch of vectors by constant weights",
            "flatten each record, then use Linear",
        )
    W = weights_as_float64(weight)
    return Operator(kind="linear", table=matrix_table(W.T if transposed else W))


def _convolution(node: Node, source: Node, effort: Effort) -> Operator:
    _require_data_first(node)
    weight, _, stride, padding, dilation, transposed, _, groups = node.args[1:9]
    W = weights_as_float64(weight)
    num_axes = W.ndim - 2
    if transposed:
        _refuse("transposed convolutions have no bound here", "use Conv1d or Conv2d")
    if num_axes not in (1, 2) or len(source.shape) != W.ndim:
        _refuse(
            f"a convolution over {num_axes} axes of an input of shape {source.shape[1:]} has no bound here",
            "use Conv1d or Conv2d",
        )

    def per_axis(values: list[int], fill: int) -> tuple[int, int]:
        full = list(values) * (num_axes if len(values) == 1 else 1)
        return (full[0], full[1]) if num_axes == 2 else (fill, full[0])

    geometry = ConvGeometry(
        size_in=per_axis(list(source.shape[2:]), 1),
        size_out=per_axis(list(node.shape[2:]), 1),
        stride=per_axis(stride, 1),
        padding=per_axis(padding, 0),
        dilation=per_axis(dilation, 1),
        groups=groups,
    )
    kernel = W if num_axes == 2 else W[:, :, None, :]
    table = conv_table(kernel, geometry=geometry, dense_entries=effort.dense_entries, symbol_flops=effort.symbol_flops)
    return Operator(kind=f"conv{num_axes}d", table=table)


def _batch_norm(node: Node, source: Node, effort: Effort) -> Operator:
    _require_data_first(node)
    weight, _, mean, variance = node.args[1:5]
    legit_eval = node.op == "_native_batch_norm_legit_no_training"
    if mean is None or variance is None or (not legit_eval and node.args[5]):
        _refuse(
            "batch statistics mix records, so no per-record bound exists", "call .eval(), with track_running_stats=True"
        )
    epsilon = float(node.args[6 if legit_eval else 7])
    if source.dtype == torch.float32:
        epsilon = min(epsilon, float(np.float32(epsilon)))  # the kernel casts eps to float32
    gain = None if weight is None else weights_as_float64(weight)
    d = batch_norm_multipliers(gain, variance=weights_as_float64(variance), epsilon=epsilon)
    return Operator(kind="batch_norm", table=diagonal_table(d, repeats=math.prod(source.shape[2:])))


def _scaling(node: Node, source: Node, effort: Effort) -> Operator:
    """x·c, c·x or x/c with a constant c."""
    left, right = node.args[:2]
    if len(node.parents) != 1 or (isinstance(left, Ref) and isinstance(right, Ref)):
        _refuse(
            "products and quotients of two values that depend on the input are unbounded", "multiply by constants only"
        )
    if node.op == "div" and (not isinstance(left, Ref) or node.kwargs.get("rounding_mode") is not None):
        _refuse("dividing by the input, or rounding the quotient, has no bound", "divide the input by constants only")
    constant = right if isinstance(left, Ref) else left
    require_constant_operand(constant, node=node, source=source)
    d = constant_multipliers(constant, dtype=source.dtype, divide=node.op == "div")
    return Operator(kind="scaling", table=diagonal_table(d, repeats=math.prod(node.shape[1:]) // d.size))


def require_constant_operand(constant: Any, *, node: Node, source: Node) -> None:
    """Refuse a constant that carries a batch dimension or makes the value larger.

    Raises:
        NoBoundError: with the rule and the fix.
    """
    if node.shape != source.shape:
        _refuse(
            f"it spreads values of shape {source.shape[1:]} over {node.shape[1:]}",
            "use constants of the record's own shape",
        )
    if isinstance(constant, torch.Tensor):
        if constant.ndim == len(node.shape) and constant.shape[0] != 1:
            _refuse("its constant differs from record to record of a batch", "use a constant without a batch dimension")
        weights_as_float64(constant)
    else:
        cast_candidates(constant, source.dtype)


def _rearranged(node: Node, source: Node, effort: Effort) -> Operator:
    """Views, permutations, crops and padding: every output is one input or a constant, and no input is used twice."""
    _require_data_first(node)
    ndim = len(source.shape)
    moved: list[int] = []
    if node.op == "permute":
        moved = [0] if node.args[1][0] % ndim != 0 else []
    elif node.op == "transpose":
        moved = [dim for dim in node.args[1:3] if dim % ndim == 0]
    elif node.op == "unsqueeze":
        moved = [0] if node.args[1] % (ndim + 1) == 0 else []
    elif node.op == "constant_pad_nd":
        moved = [0] if len(node.args[1]) // 2 >= ndim else []
        cast_candidates(node.args[2] if len(node.args) > 2 else 0, source.dtype)
    if moved:
        _refuse("it moves the batch dimension", "keep the batch as the first dimension")
    return Operator(
        kind="rearranged", table=lipschitz_table(1.0, size=min(math.prod(source.shape[1:]), math.prod(node.shape[1:])))
    )


def _pair(values: Any, default: tuple[int, int]) -> tuple[int, int]:
    listed = list(values) if isinstance(values, list | tuple) else [values]
    if not listed:
        return default
    return (listed[0], listed[0]) if len(listed) == 1 else (listed[0], listed[1])


def _require_image(source: Node) -> tuple[int, int, int]:
    if len(source.shape) != 4:
        _refuse(
            f"pooling over records of shape {source.shape[1:]} has no bound here",
            "give each record channels and pixels",
        )
    return source.shape[1], source.shape[2], source.shape[3]


def _max_pool(node: Node, source: Node, effort: Effort) -> Operator:
    _require_data_first(node)
    _, *sizes = _require_image(source)
    defaults: tuple[Any, ...] = ([], 0, 1)
    _, kernel, stride, padding, dilation = (*node.args[:5], *defaults[len(node.args[:5]) - 2 :])
    window = _pair(kernel, (1, 1))
    step, pad, spread = _pair(stride, window), _pair(padding, (0, 0)), _pair(dilation, (1, 1))
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
    _require_data_first(node)
    channels, *sizes = _require_image(source)
    if node.op == "_adaptive_avg_pool2d":
        axes = [adaptive_windows(sizes[axis], node.shape[2 + axis]) for axis in (0, 1)]
        return Operator(kind="avg_pool", table=average_table(axes[0], axes[1], channels=channels))
    defaults: tuple[Any, ...] = ([], 0, False, True, None)
    _, kernel, stride, padding, _, include, divisor = (*node.args[:7], *defaults[len(node.args[:7]) - 2 :])
    window = _pair(kernel, (1, 1))
    step, pad = _pair(stride, window), _pair(padding, (0, 0))
    if divisor is not None and divisor <= 0:
        _refuse(f"its divisor_override is {divisor}", "use a positive divisor")
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
    _require_data_first(node)
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or len(dims) == 0 or any(dim % len(source.shape) == 0 for dim in dims):
        _refuse("it reduces over the batch, so records mix", "name the dimensions to reduce, without the first")
    num_reduced = math.prod(source.shape[dim] for dim in dims)
    weight = div_up(1.0, float(num_reduced)) if node.op == "mean" else 1.0
    return Operator(
        kind=node.op, table=reduction_table(weight, num_reduced=num_reduced, num_out=math.prod(node.shape[1:]))
    )


_RULES: dict[str, Callable[[Node, Node, Effort], Operator]] = {
    **dict.fromkeys(("addmm", "mm", "linear"), _linear),
    "convolution": _convolution,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    **dict.fromkeys(("mul", "div"), _scaling),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "squeeze", "unsqueeze"), _rearranged),
    **dict.fromkeys(("permute", "transpose", "constant_pad_nd"), _rearranged),
    **dict.fromkeys(("clone", "alias", "detach", "contiguous", "_to_copy"), _rearranged),
    "max_pool2d_with_indices": _max_pool,
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d"), _average_pool),
    **dict.fromkeys(("mean", "sum"), _reduction),
}
