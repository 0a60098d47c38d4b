"""Slopes and values of activations on intervals: what interval methods need beyond the largest slope.

Slopes come from `curves` and `broken_lines`. Values at ends are torch's in float64, taken to be within `LIBRARY_ERROR`
of the truth: relative to the value, or to the argument where a formula subtracts from 1 (GELU).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sensitivity.operators.activations import activation_slope
from sensitivity.operators.broken_lines import argument, piece_slopes, prelu_weights
from sensitivity.operators.curves import BLUR, curve_of, curve_slopes
from sensitivity.rounding import FloatArray

Range = tuple[FloatArray, FloatArray]
LIBRARY_ERROR = 2.0**-44
TINY = 1e-300  # above what an exponential loses by underflow
_CAST = 2.0**-23  # a Python number may act as its float32 cast
_EXACT = ("relu", "abs", "neg", "_prelu_kernel")
_BENT_AT_ZERO = ("abs", "leaky_relu", "_prelu_kernel", "elu", "celu")  # they may turn at 0, where their value is 0
_HARDSWISH_VALLEY = (-1.5, -0.375)


def slope_range(op: str, *, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Range | None:
    """Least and largest slope of an activation over the reals.

    Args:
        op: name of the recorded operator.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.

    Returns:
        (a, b), of one entry, or one per channel for PReLU; None if the operator is no activation.

    Raises:
        ValueError: if its parameters give no bound.

    Guarantee: every secant of the activation, jumps left out, has its slope in [a, b].

    Example:
        >>> [side.tolist() for side in slope_range("relu", args=(), kwargs={}, dtype=torch.float32)]
        [[0.0], [1.0]]
    """
    count = args[0].numel() if op == "_prelu_kernel" else 1
    if op == "_prelu_kernel":
        args = (args[0].reshape(-1), *args[1:])
    return slope_range_on(
        op, args=args, kwargs=kwargs, dtype=dtype, low=np.full(count, -np.inf), high=np.full(count, np.inf)
    )


def slope_range_on(
    op: str,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    low: FloatArray,
    high: FloatArray,
) -> Range | None:
    """Least and largest slope per entry where the data lies in [low, high].

    Args:
        op: name of the recorded operator.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.
        low: least data, any shape (that of one record, for PReLU); NaN stands for −∞.
        high: largest data, same shape; NaN stands for ∞.

    Returns:
        (a, b) of that shape; None if the operator is no activation.

    Raises:
        ValueError: if its parameters give no bound, or low exceeds high somewhere.

    Guarantee: every secant between two points of the interval has its slope in [a, b], jumps left out.

    Edge cases: infinite ends are allowed; at an interval of one point the slopes are those of the pieces that meet it.

    Example:
        >>> ends = {"low": np.array([1.0, -2.0, -1.0]), "high": np.array([3.0, -1.0, 1.0])}
        >>> [s.tolist() for s in slope_range_on("relu", args=(), kwargs={}, dtype=torch.float32, **ends)]
        [[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]]
    """
    slope = activation_slope(op, args=args, kwargs=kwargs, dtype=dtype)
    if slope is None:
        return None
    low, high = _interval(low, high)
    curve = curve_of(op, kwargs)
    if curve is not None:
        return curve_slopes(curve, low=low, high=high)
    least, largest = piece_slopes(op, args=args, kwargs=kwargs, dtype=dtype, low=low, high=high)
    return np.maximum(least, -slope.value), np.minimum(largest, slope.value)


def value_range_on(
    op: str,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    low: FloatArray,
    high: FloatArray,
) -> Range | None:
    """Least and largest value per entry where the data lies in [low, high].

    Args:
        op: name of the recorded operator.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.
        low: least data, any shape (that of one record, for PReLU); NaN stands for −∞.
        high: largest data, same shape; NaN stands for ∞.

    Returns:
        (least, largest) of that shape, rounded outward; None if the operator is no activation.

    Raises:
        ValueError: if its parameters give no bound, or low exceeds high somewhere.

    Guarantee: the activation of every point of the interval lies in the range, in exact arithmetic, with parameters as
        given or as their casts.

    Edge cases: infinite ends are allowed: tanh of [−∞, ∞] is [−1, 1].

    Example:
        >>> ends = {"low": np.array([-np.inf]), "high": np.array([np.inf])}
        >>> [float(s[0]) for s in value_range_on("sigmoid", args=(), kwargs={}, dtype=torch.float32, **ends)]
        [0.0, 1.0]
    """
    slope = activation_slope(op, args=args, kwargs=kwargs, dtype=dtype)
    if slope is None:
        return None
    low, high = _interval(low, high)
    if op in ("sin", "cos"):
        return np.full(low.shape, -1.0), np.full(low.shape, 1.0)
    curve = curve_of(op, kwargs)
    valley = _HARDSWISH_VALLEY if op == "hardswish" else None if curve is None else curve.valley
    ends = [_evaluated(op, args, kwargs, side) for side in (low, high)]
    if curve is not None:
        limits = [np.where(side > 0.0, curve.ends[1], curve.ends[0]) for side in (low, high)]
        ends = [np.where(np.isinf(x), limit, v) for x, limit, v in zip((low, high), limits, ends, strict=True)]
    least, largest = np.minimum(*ends), np.maximum(*ends)
    if op in _BENT_AT_ZERO:
        inside = (low <= 0.0) & (high >= 0.0)
        least = np.where(inside, np.minimum(least, 0.0), least)
        largest = np.where(inside, np.maximum(largest, 0.0), largest)
    if valley is not None:
        inside = (low <= valley[0] + BLUR) & (high >= valley[0] - BLUR)
        least = np.where(inside, np.minimum(least, valley[1]), least)
    wide = _finite(np.maximum(np.abs(least), np.abs(largest))) * LIBRARY_ERROR + slope.jump
    wide = np.zeros(low.shape) if op in _EXACT else wide + TINY
    if dtype == torch.float32 and curve is None and op not in _EXACT:
        wide = wide + _parameter_error(op, args, kwargs, low, high)
    if curve is not None and curve.cancels:
        wide = wide + np.minimum(np.maximum(np.abs(low), np.abs(high)), 64.0) * LIBRARY_ERROR
    least, largest = (
        np.where(np.isnan(least), -np.inf, least - wide),
        np.where(np.isnan(largest), np.inf, largest + wide),
    )
    return (least, largest) if curve is None else (np.clip(least, *curve.bounds), np.clip(largest, *curve.bounds))


def _interval(low: FloatArray, high: FloatArray) -> Range:
    low, high = (np.asarray(side, dtype=np.float64) for side in (low, high))
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    if bool((low > high).any()):
        raise ValueError("an interval of pre-activations has low > high: it needs low <= high; swap its ends")
    return low, high


@torch.no_grad()
def _evaluated(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], side: FloatArray) -> FloatArray:
    """Torch's values in float64."""
    if op == "hardswish":
        side = np.maximum(side, -3.0)  # it is 0 below, which torch computes as −∞·0 at the end
    if op == "_prelu_kernel":
        args = (torch.from_numpy(prelu_weights(args, shape=side.shape).copy()),)
    made = getattr(torch.ops.aten, op)(torch.from_numpy(np.ascontiguousarray(side)), *args, **kwargs)
    values: FloatArray = (made if isinstance(made, torch.Tensor) else made[0]).numpy()
    return values.reshape(side.shape)


def _parameter_error(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: FloatArray, high: FloatArray
) -> FloatArray:
    """How far the cast of a parameter to float32 may move the value; values are Lipschitz in their parameters."""
    numbers = [abs(float(a)) for a in (*args, *kwargs.values()) if isinstance(a, int | float)]
    finite = [number for number in numbers if math.isfinite(number)]
    if op not in ("elu", "celu", "softplus", "leaky_relu"):
        return np.full(low.shape, sum(finite) * _CAST)  # limits, which move the value by no more than themselves
    reach = np.maximum(_finite(np.abs(low)), _finite(np.abs(high))) + 1.0
    product = math.prod(max(1.0, number) for number in finite)
    if op == "softplus":
        product += 1.0 / abs(float(argument(args, kwargs, 0, "beta", 1.0)))
    wide: FloatArray = reach * (product * 8.0 * _CAST)
    return wide


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)
