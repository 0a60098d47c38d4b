"""Activations that consist of pieces: broken lines, and those whose parameters set the pieces' slopes.

Each rule lists the pieces: where the interval [low, high] meets one, and the least and largest slope there. A Python
parameter may act as its cast to the data's element type, so limits are known as a pair.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from sensitivity.operators.activations import cast_candidates
from sensitivity.operators.curves import MARGIN
from sensitivity.rounding import FloatArray, div_up

Pieces = list[tuple[NDArray[np.bool_], Any, Any]]


def piece_slopes(
    op: str,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    low: FloatArray,
    high: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Least and largest slope of an activation of pieces where its argument lies in [low, high].

    Args:
        op: name of the recorded operator, one of those known here.
        args: its arguments after the data.
        kwargs: its keyword arguments.
        dtype: element type of the data.
        low: least argument, any shape; infinities allowed.
        high: largest argument, same shape.

    Returns:
        (least, largest) of that shape, rounded outward.

    Example:
        >>> ends = {"low": np.array([-1.0]), "high": np.array([2.0])}
        >>> [float(side[0]) for side in piece_slopes("abs", args=(), kwargs={}, dtype=torch.float32, **ends)]
        [-1.0, 1.0]
    """
    pieces = _PIECES[op](args, kwargs, dtype, low, high)
    least, largest = np.full(low.shape, np.inf), np.full(low.shape, -np.inf)
    for met, a, b in pieces:
        least = np.where(met, np.minimum(least, a), least)
        largest = np.where(met, np.maximum(largest, b), largest)
    return least, largest


def prelu_weights(args: tuple[Any, ...], *, shape: tuple[int, ...]) -> FloatArray:
    """PReLU's slopes per entry of one record: its kernel gets them with a batch dimension of 1.

    Example:
        >>> prelu_weights((torch.tensor([[[0.5], [-1.0]]]),), shape=(2, 3)).tolist()
        [[0.5, 0.5, 0.5], [-1.0, -1.0, -1.0]]
    """
    weight: FloatArray = args[0].detach().to("cpu", torch.float64).numpy()
    return np.broadcast_to(weight[0] if weight.ndim == len(shape) + 1 else weight, shape)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    """An argument by position or by name."""
    return args[position] if position < len(args) else kwargs.get(name, default)


def _meets(low: FloatArray, high: FloatArray, left: float, right: float) -> NDArray[np.bool_]:
    """Whether [low, high] has a part of some length, or its only point, in [left, right]."""
    point: NDArray[np.bool_] = (low == high) & (low >= left) & (low <= right)
    met: NDArray[np.bool_] = (high > left) & (low < right)
    return met | point


def _signed_candidates(value: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Least and largest of a number and its cast."""
    both = [math.copysign(magnitude, value) for magnitude in cast_candidates(value, dtype)]
    return min(both), max(both)


def _bent(low: FloatArray, high: FloatArray, a: Any, b: Any) -> Pieces:
    """Slope in [a, b] below 0, and 1 above."""
    return [(_meets(low, high, -math.inf, 0.0), a, b), (_meets(low, high, 0.0, math.inf), 1.0, 1.0)]


def _relu(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    return _bent(low, high, 0.0, 0.0)


def _abs(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    return _bent(low, high, -1.0, -1.0)


def _leaky_relu(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    return _bent(low, high, *_signed_candidates(argument(args, kwargs, 0, "negative_slope", 0.01), dtype))


def _prelu(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    weight = prelu_weights(args, shape=low.shape)
    return _bent(low, high, weight, weight)


def _inside(
    low: FloatArray, high: FloatArray, limits: tuple[Any, Any], dtype: torch.dtype, slopes: tuple[float, float, float]
) -> Pieces:
    """Slopes (outside, least inside, largest inside) of the limits, which may act as their casts."""
    sides = []
    for position, limit in enumerate(limits):
        is_open = limit is None or math.isinf(limit)
        infinite = (-math.inf, math.inf)[position] if limit is None else limit
        sides.append((infinite, infinite) if is_open else _signed_candidates(limit, dtype))
    outside, a, b = slopes
    return [
        (_meets(low, high, -math.inf, sides[0][1]), outside, outside),
        (_meets(low, high, sides[0][0], sides[1][1]), a, b),
        (_meets(low, high, sides[1][0], math.inf), outside, outside),
    ]


def _clamp(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    limits = argument(args, kwargs, 0, "min", None), argument(args, kwargs, 1, "max", None)
    return _inside(low, high, limits, dtype, (0.0, 1.0, 1.0))


def _clamp_max(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    return _inside(low, high, (None, argument(args, kwargs, 0, "max", None)), dtype, (0.0, 1.0, 1.0))


def _hardtanh(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    limits = argument(args, kwargs, 0, "min_val", -1.0), argument(args, kwargs, 1, "max_val", 1.0)
    return _inside(low, high, limits, dtype, (0.0, 1.0, 1.0))


def _hardsigmoid(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    sixth = div_up(1.0, 6.0)
    return _inside(low, high, (-3.0, 3.0), dtype, (0.0, math.nextafter(sixth, 0.0), sixth))


def _softshrink(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    limit = argument(args, kwargs, 0, "lambd", 0.5)
    return _inside(low, high, (-limit, limit), dtype, (1.0, 0.0, 0.0))


def _threshold(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    return _inside(low, high, (argument(args, kwargs, 0, "threshold", 0.0), None), dtype, (0.0, 1.0, 1.0))


def _constant(a: float, b: float) -> Callable[..., Pieces]:
    def pieces(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
        return [(np.ones(low.shape, dtype=np.bool_), a, b)]

    return pieces


def _hardswish(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    """Slope 0 below −3, x/3 + ½ up to 3, then 1."""
    ends = (np.clip(side, -3.0, 3.0) / 3.0 + 0.5 for side in (low, high))
    a, b = (np.clip(end + sign * MARGIN, -0.5, 1.5) for end, sign in zip(ends, (-1.0, 1.0), strict=True))
    return [
        (_meets(low, high, -math.inf, -3.0), 0.0, 0.0),
        (_meets(low, high, -3.0, 3.0), a, b),
        (_meets(low, high, 3.0, math.inf), 1.0, 1.0),
    ]


def _elu(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    """Slope scale above 0, alpha·scale·i·e^{ix} below, i the input scale."""
    names = ("alpha", "scale", "input_scale")
    alpha, scale, rate = (_signed_candidates(argument(args, kwargs, k, n, 1.0), dtype) for k, n in enumerate(names))
    return _exponential(low, high, scale, [a * s * i for a in alpha for s in scale for i in rate], rate)


def _celu(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    """Slope 1 above 0, e^{x/α} below."""
    alpha = _signed_candidates(argument(args, kwargs, 0, "alpha", 1.0), dtype)
    return _exponential(low, high, (1.0, 1.0), [1.0], (1.0 / alpha[1], 1.0 / alpha[0]))


def _exponential(
    low: FloatArray, high: FloatArray, above: tuple[float, float], factors: list[float], rates: tuple[float, float]
) -> Pieces:
    below: list[FloatArray] = []
    for end in (low, high):
        x = np.minimum(end, 0.0)
        with np.errstate(invalid="ignore", under="ignore"):  # −∞ times a rate of 0
            decays = [np.nan_to_num(np.exp(rate * x), nan=1.0) for rate in rates]
        below.extend(factor * decay for factor in factors for decay in decays)
    extremes = [0.0, *factors]
    wide = (1.0 + 1e-12) * max(abs(factor) for factor in factors) * MARGIN
    a = np.maximum(np.minimum.reduce(below) - wide, min(extremes) * (1.0 + 1e-12))
    b = np.minimum(np.maximum.reduce(below) + wide, max(extremes) * (1.0 + 1e-12))
    return [(_meets(low, high, -math.inf, 0.0), a, b), (_meets(low, high, 0.0, math.inf), *above)]


def _softplus(args: Any, kwargs: Any, dtype: torch.dtype, low: FloatArray, high: FloatArray) -> Pieces:
    """Slope σ(βx) up to the threshold, 1 above."""
    beta = _signed_candidates(argument(args, kwargs, 0, "beta", 1.0), dtype)
    threshold = _signed_candidates(argument(args, kwargs, 1, "threshold", 20.0), dtype)
    with np.errstate(over="ignore"):
        products = [b * end for b in beta for end in (low, high)]
    slopes = [special.expit(product) for product in products]
    a = np.clip(np.minimum.reduce(slopes) - MARGIN, 0.0, 1.0)
    b = np.clip(np.maximum.reduce(slopes) + MARGIN, 0.0, 1.0)
    everywhere = np.ones(low.shape, dtype=np.bool_)
    return [(everywhere, a, b), (np.maximum.reduce(products) >= threshold[0], 1.0, 1.0)]


_PIECES: dict[str, Callable[..., Pieces]] = {
    "relu": _relu,
    "abs": _abs,
    "neg": _constant(-1.0, -1.0),
    "sin": _constant(-1.0, 1.0),
    "cos": _constant(-1.0, 1.0),
    "leaky_relu": _leaky_relu,
    "_prelu_kernel": _prelu,
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "hardsigmoid": _hardsigmoid,
    "softshrink": _softshrink,
    "threshold": _threshold,
    "hardswish": _hardswish,
    "elu": _elu,
    "celu": _celu,
    "softplus": _softplus,
}
