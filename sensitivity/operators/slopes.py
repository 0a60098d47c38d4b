"""Slopes and values of activations on intervals: what interval methods need beyond the largest slope.

Letters: [a, b] encloses the slope of every secant. Where no tighter rule is known, a = −b with b the largest slope.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sensitivity.operators.activations import activation_slope, cast_candidates
from sensitivity.rounding import FloatArray

# Least slopes, rounded down; they lie where the second derivative vanishes (see `activations` for the largest ones).
_LEAST: dict[str, float] = {"gelu": -0.12899421, "silu": -0.09983932, "mish": -0.11252597, "hardswish": -0.5}
_MONOTONE = (
    *("relu", "tanh", "sigmoid", "hardsigmoid", "softplus", "log_sigmoid_forward", "softshrink", "hardtanh"),
    *("clamp", "clamp_min", "clamp_max"),
)
_BY_ENDS = ("relu", "tanh", "sigmoid", "hardsigmoid", "hardtanh", "clamp", "clamp_min", "clamp_max", "softshrink")
LIBRARY_ERROR = 64.0 * 2.0**-53  # far above the relative error of tanh and sigmoid in float64


def slope_range(
    op: str, *, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[FloatArray, FloatArray] | None:
    """Least and largest slope of an activation over the reals.

    Args:
        op: name of the recorded operator.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.

    Returns:
        (a, b), of one entry, or one per channel for PReLU; None if the operator is no activation.

    Guarantee: every secant of the activation, jumps left out, has its slope in [a, b].

    Example:
        >>> [side.tolist() for side in slope_range("relu", args=(), kwargs={}, dtype=torch.float32)]
        [[0.0], [1.0]]
    """
    slope = activation_slope(op, args=args, kwargs=kwargs, dtype=dtype)
    if slope is None:
        return None
    high = np.array([slope.value])
    if op in _MONOTONE:
        return np.zeros(1), high
    if op in _LEAST:
        return np.array([_LEAST[op]]), high
    if op == "leaky_relu":
        negative = args[0] if args else kwargs.get("negative_slope", 0.01)
        return np.array([min(1.0, *(math.copysign(c, negative) for c in cast_candidates(negative, dtype)))]), high
    return -high, high


def slope_range_on(
    op: str,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    low: FloatArray,
    high: FloatArray,
) -> tuple[FloatArray, FloatArray] | None:
    """Least and largest slope per entry where the data lies in [low, high].

    Args:
        op: name of the recorded operator.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.
        low: least data, any shape.
        high: largest data, same shape.

    Returns:
        (a, b) of that shape; None if the operator is no activation or its slopes differ per channel.

    Guarantee: every secant between two points of the interval has its slope in [a, b].

    Example:
        >>> ends = np.array([1.0, -2.0]), np.array([3.0, -1.0])
        >>> [s.tolist() for s in slope_range_on("relu", args=(), kwargs={}, dtype=torch.float32, low=ends[0], high=ends[1])]
        [[1.0, 0.0], [1.0, 0.0]]
    """
    known = slope_range(op, args=args, kwargs=kwargs, dtype=dtype)
    if known is None or known[0].size != 1:
        return None
    a, b = np.full(low.shape, known[0][0]), np.full(low.shape, known[1][0])
    if op == "relu":
        a, b = np.where(low >= 0.0, 1.0, 0.0), np.where(high <= 0.0, 0.0, 1.0)
    return a, b


def value_range_on(
    op: str,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    low: FloatArray,
    high: FloatArray,
) -> tuple[FloatArray, FloatArray] | None:
    """Least and largest value per entry where the data lies in [low, high]; None if no rule is known.

    Guarantee: rounded outward.

    Example:
        >>> wide = np.array([-np.inf]), np.array([np.inf])
        >>> [float(s[0]) for s in value_range_on("sigmoid", args=(), kwargs={}, dtype=torch.float32, low=wide[0], high=wide[1])]
        [0.0, 1.0]
    """
    if op not in _BY_ENDS:
        return None
    function = getattr(torch.ops.aten, op)
    with torch.no_grad():
        bottom, top = (function(torch.as_tensor(side), *args, **kwargs).numpy() for side in (low, high))
    if op in ("relu", "hardtanh", "clamp", "clamp_min", "clamp_max"):
        # Limits may act as their casts.
        cast = 2.0**-23 if op != "relu" and dtype == torch.float32 else 0.0
        return bottom - np.abs(bottom) * cast, top + np.abs(top) * cast
    error = 2.0**-22 if dtype == torch.float32 and op == "softshrink" else LIBRARY_ERROR
    lower = bottom - np.where(np.isfinite(bottom), np.abs(bottom) * error, 0.0)
    upper = top + np.where(np.isfinite(top), np.abs(top) * error, 0.0)
    if op in ("tanh", "sigmoid", "hardsigmoid"):
        least = -1.0 if op == "tanh" else 0.0
        lower, upper = np.clip(lower, least, 1.0), np.clip(upper, least, 1.0)
    return lower, upper
