"""Smooth activations: their derivatives, where these turn, and the values at the ends.

On an interval the derivative's range is the hull of its values at the ends and of the extremes at the turns inside.
Derivatives are computed in float64 by formulas whose error stays below 2⁻⁴⁴ (their terms are of order 1, and those that
grow are multiplied by exponentials that fall faster), and widened by `MARGIN`; turns are known to within `BLUR`. The
tests compute places and extremes again with mpmath.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from sensitivity.operators.activations import ERF_SLOPE, GELU_SLOPE, MISH_SLOPE, SILU_SLOPE, TANH_GELU_SLOPE
from sensitivity.rounding import FloatArray

MARGIN = 2.0**-40
BLUR = 1e-9


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A smooth activation.

    Attributes:
        derivative: in float64, for finite arguments.
        limits: of the derivative at −∞ and ∞.
        turns: places where the derivative has an extreme, each with that extreme rounded outward.
        valley: where the curve itself turns upward, with its value rounded down; None if it never falls.
        ends: its values at −∞ and ∞.
        bounds: values that it never leaves.
        cancels: whether its formula loses up to a unit of roundoff of its argument.
    """

    derivative: Callable[[FloatArray], FloatArray]
    limits: tuple[float, float]
    turns: tuple[tuple[float, float], ...]
    ends: tuple[float, float]
    valley: tuple[float, float] | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)
    cancels: bool = False


def curve_of(op: str, kwargs: dict[str, Any]) -> Curve | None:
    """The curve of an activation, or None if it is no smooth activation known here.

    Example:
        >>> curve_of("gelu", {"approximate": "tanh"}).limits
        (0.0, 1.0)
    """
    return _GELUS.get(kwargs.get("approximate", "none")) if op == "gelu" else _CURVES.get(op)


def curve_slopes(curve: Curve, *, low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least and largest derivative of a curve where its argument lies in [low, high].

    Args:
        curve: the activation.
        low: least argument, any shape; infinities allowed.
        high: largest argument, same shape.

    Returns:
        (least, largest) of that shape, rounded outward.

    Example:
        >>> least, largest = curve_slopes(curve_of("tanh", {}), low=np.array([-1.0]), high=np.array([2.0]))
        >>> 0.0706 < float(least[0]) < 1.0 - math.tanh(2.0) ** 2, float(largest[0])
        (True, 1.0)
    """
    sides = []
    for end in (low, high):
        infinite = np.isinf(end)
        with np.errstate(over="ignore", under="ignore"):
            inner = curve.derivative(np.where(infinite, 0.0, end))
        value = np.where(infinite, np.where(end > 0.0, curve.limits[1], curve.limits[0]), inner)
        sides.append((value, np.where(infinite, 0.0, MARGIN)))
    least = np.minimum(*[value - margin for value, margin in sides])
    largest = np.maximum(*[value + margin for value, margin in sides])
    for place, extreme in curve.turns:
        inside = (low <= place + BLUR) & (high >= place - BLUR)
        least = np.where(inside, np.minimum(least, extreme), least)
        largest = np.where(inside, np.maximum(largest, extreme), largest)
    extremes = [*curve.limits, *(extreme for _, extreme in curve.turns)]
    return np.clip(least, min(extremes), max(extremes)), np.clip(largest, min(extremes), max(extremes))


def _gelu_derivative(x: FloatArray) -> FloatArray:
    derivative: FloatArray = special.ndtr(x) + x * np.exp(-(x * x) / 2.0) / math.sqrt(2.0 * math.pi)
    return derivative


def _tanh_gelu_derivative(x: FloatArray) -> FloatArray:
    x = np.clip(x, -1e3, 1e3)  # constant to double precision long before
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    steep = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
    t = np.tanh(inner)
    derivative: FloatArray = (1.0 + t) / 2.0 + x / 2.0 * steep / np.cosh(np.clip(inner, -300.0, 300.0)) ** 2
    return derivative


def _silu_derivative(x: FloatArray) -> FloatArray:
    s = special.expit(x)
    derivative: FloatArray = s + x * (s * special.expit(-x))
    return derivative


def _mish_derivative(x: FloatArray) -> FloatArray:
    t = np.tanh(np.logaddexp(0.0, x))
    derivative: FloatArray = t + x * ((1.0 - t) * (1.0 + t)) * special.expit(x)
    return derivative


_CURVES: dict[str, Curve] = {
    "tanh": Curve(
        derivative=lambda x: 1.0 - np.tanh(x) ** 2,
        limits=(0.0, 0.0),
        turns=((0.0, 1.0),),
        ends=(-1.0, 1.0),
        bounds=(-1.0, 1.0),
    ),
    "sigmoid": Curve(
        derivative=lambda x: special.expit(x) * special.expit(-x),
        limits=(0.0, 0.0),
        turns=((0.0, 0.25),),
        ends=(0.0, 1.0),
        bounds=(0.0, 1.0),
    ),
    "log_sigmoid_forward": Curve(
        derivative=lambda x: special.expit(-x),
        limits=(1.0, 0.0),
        turns=(),
        ends=(-math.inf, 0.0),
        bounds=(-math.inf, 0.0),
    ),
    "atan": Curve(
        derivative=lambda x: 1.0 / (1.0 + x * x),
        limits=(0.0, 0.0),
        turns=((0.0, 1.0),),
        ends=(-math.pi / 2.0, math.pi / 2.0),
    ),
    "asinh": Curve(
        derivative=lambda x: 1.0 / np.hypot(1.0, x),
        limits=(0.0, 0.0),
        turns=((0.0, 1.0),),
        ends=(-math.inf, math.inf),
    ),
    "erf": Curve(
        derivative=lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-x * x),
        limits=(0.0, 0.0),
        turns=((0.0, ERF_SLOPE),),
        ends=(-1.0, 1.0),
        bounds=(-1.0, 1.0),
    ),
    "silu": Curve(
        derivative=_silu_derivative,
        limits=(0.0, 1.0),
        turns=((-2.399357280515, -0.09983932012886693), (2.399357280515, SILU_SLOPE)),
        ends=(0.0, math.inf),
        valley=(-1.278464542761, -0.27846454276107384),
    ),
    "mish": Curve(
        derivative=_mish_derivative,
        limits=(0.0, 1.0),
        turns=((-2.256376396361, -0.11252612238946258), (1.490571179485, MISH_SLOPE)),
        ends=(0.0, math.inf),
        valley=(-1.192431214515, -0.30884341301725045),
    ),
}
_GELUS = {
    "none": Curve(
        derivative=_gelu_derivative,
        limits=(0.0, 1.0),
        turns=((-math.sqrt(2.0), -0.1289041451851548), (math.sqrt(2.0), GELU_SLOPE)),
        ends=(0.0, math.inf),
        valley=(-0.751791524694, -0.16997120747990369),
        cancels=True,
    ),
    "tanh": Curve(
        derivative=_tanh_gelu_derivative,
        limits=(0.0, 1.0),
        turns=((-1.418504008791, -0.12899306865877178), (1.418504008791, TANH_GELU_SLOPE)),
        ends=(0.0, math.inf),
        valley=(-0.752461422071, -0.17004075057125408),
        cancels=True,
    ),
}
