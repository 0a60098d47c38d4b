"""Largest slopes of elementwise activations, and the jumps of those that jump.

Slopes that are roots of transcendental equations are stored as decimals rounded up in the last digit; the tests
compute each again with mpmath. A Python scalar such as LeakyReLU's slope acts as itself or as its cast to the input's
element type: the larger one counts.
"""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sensitivity.rounding import add_up, div_up, mul_up

GELU_SLOPE = 1.1289041451851551
TANH_GELU_SLOPE = 1.1289930686587725
SILU_SLOPE = 1.0998393201288672
MISH_SLOPE = 1.0884981612517282
ERF_SLOPE = 1.1283791670955126
DISCONTINUOUS = {
    "hardshrink": "use Softshrink, which is continuous",
    "threshold": "use ReLU or Hardtanh, which are continuous",
}


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Facts of an elementwise function f: |f(a) − f(b)| ≤ slope·|a − b| + jump.

    Attributes:
        value: largest slope in magnitude, rounded up.
        jump: largest jump, rounded up; 0 for continuous functions.
    """

    value: float
    jump: float = 0.0


def activation_slope(op: str, *, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope | None:
    """Slope of an activation.

    Args:
        op: functional operator name, such as "gelu".
        args: its arguments after the input.
        kwargs: its keyword arguments.
        dtype: element type of the input.

    Returns:
        The slope, or None if `op` is no activation known here.

    Raises:
        ValueError: if its parameters give no bound.

    Guarantee: |f(a) − f(b)| ≤ value·|a − b| + jump for all real a and b.

    Source: PyTorch's documentation for the formulas; derivatives by hand.

    Example:
        >>> activation_slope("silu", args=(), kwargs={}, dtype=torch.float32)
        Slope(value=1.0998393201288672, jump=0.0)
    """
    if op in _FIXED:
        return Slope(value=_FIXED[op])
    if op in _UNBOUNDED:
        raise ValueError(_UNBOUNDED[op])
    rule = _RULES.get(op)
    return None if rule is None else rule(args, kwargs, dtype)


def cast_candidates(value: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Magnitudes that a Python scalar may act with: its own and that of its cast to `dtype`.

    Raises:
        ValueError: if it is no finite real number.

    Example:
        >>> cast_candidates(-0.5, torch.float32)
        (0.5, 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"parameter {value!r} is no real number: a slope needs one; use a float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if isinstance(value, int) and math.isfinite(number) and int(number) != value:
        raise ValueError(f"parameter {value!r} exceeds what float64 holds exactly: pass it as a float")
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    cast = rounded if dtype == torch.float32 else number
    if not (math.isfinite(number) and math.isfinite(cast)):
        raise ValueError(f"parameter {value!r} is not finite in {dtype}: no slope exists; use a finite number")
    return abs(number), abs(cast)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


def _leaky_relu(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    return Slope(value=max(1.0, *cast_candidates(_argument(args, kwargs, 0, "negative_slope", 0.01), dtype)))


def _prelu(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    weight = args[0].detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("PReLU's weight holds NaN or infinity: no slope exists; train again or clip the weights")
    return Slope(value=max(1.0, float(weight.abs().max())))


def _elu(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    alpha, scale, input_scale = (
        _argument(args, kwargs, position, name, 1.0) for position, name in enumerate(("alpha", "scale", "input_scale"))
    )
    cast_candidates(input_scale, dtype)
    if input_scale < 0:
        raise ValueError(
            f"ELU's input scale is {input_scale}: its slope then grows without bound; use a positive alpha"
        )
    a, s, i = (max(cast_candidates(value, dtype)) for value in (alpha, scale, input_scale))
    return Slope(value=max(s, mul_up(mul_up(a, s), i)))


def _celu(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    alpha = _argument(args, kwargs, 0, "alpha", 1.0)
    cast_candidates(alpha, dtype)
    if alpha <= 0:
        raise ValueError(f"CELU's alpha is {alpha}: its slope is bounded for positive alpha only; use a positive alpha")
    return Slope(value=1.0)


def _gelu(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    kind = kwargs.get("approximate", "none")
    slopes = {"none": GELU_SLOPE, "tanh": TANH_GELU_SLOPE}
    if kind not in slopes:
        raise ValueError(
            f"GELU's approximation {kind!r} is unknown: its slope is known for 'none' and 'tanh'; use one of these"
        )
    return Slope(value=slopes[kind])


def _softplus(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    """Slope 1, and a jump of log(1 + e^{−threshold})/|β| where log(1 + e^{βx})/β gives way to x, at βx = threshold."""
    beta, threshold = _argument(args, kwargs, 0, "beta", 1.0), _argument(args, kwargs, 1, "threshold", 20.0)
    smallest_beta = min(cast_candidates(beta, dtype))
    if smallest_beta == 0.0:
        raise ValueError("Softplus has beta 0: it divides by beta; use a positive beta")
    cast_candidates(threshold, dtype)
    lowest = min(float(threshold), float(np.float32(threshold)))
    if lowest < -700.0:
        raise ValueError(
            f"Softplus's threshold is {threshold}: its jump then exceeds 700/beta; use a threshold above -700"
        )
    at_threshold = math.nextafter(math.exp(-lowest) * (1.0 + 2.0**-50), math.inf)
    log_term = math.nextafter(math.log1p(at_threshold) * (1.0 + 2.0**-50), math.inf)
    return Slope(value=1.0, jump=add_up(div_up(log_term, smallest_beta)))


def _clamp(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope:
    for limit in (*args, *kwargs.values()):
        if isinstance(limit, torch.Tensor) or (isinstance(limit, float) and math.isnan(limit)):
            raise ValueError(f"its limit is {limit!r}: limits are numbers here, not tensors or NaN; use plain numbers")
    return Slope(value=1.0)


def _threshold(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Slope | None:
    """Continuous if the value below the threshold is the threshold itself; else it jumps."""
    threshold, value = _argument(args, kwargs, 0, "threshold", None), _argument(args, kwargs, 1, "value", None)
    if threshold != value:
        return None
    cast_candidates(threshold, dtype)
    return Slope(value=1.0)


_FIXED: dict[str, float] = {
    "relu": 1.0,
    "tanh": 1.0,
    "softshrink": 1.0,
    "log_sigmoid_forward": 1.0,
    "abs": 1.0,
    "neg": 1.0,
    "sin": 1.0,
    "cos": 1.0,
    "atan": 1.0,
    "asinh": 1.0,
    "erf": ERF_SLOPE,
    "sigmoid": 0.25,
    "hardsigmoid": div_up(1.0, 6.0),
    "hardswish": 1.5,
    "silu": SILU_SLOPE,
    "mish": MISH_SLOPE,
}
_RULES: dict[str, Callable[[tuple[Any, ...], dict[str, Any], torch.dtype], Slope | None]] = {
    "leaky_relu": _leaky_relu,
    "_prelu_kernel": _prelu,
    "elu": _elu,
    "celu": _celu,
    "gelu": _gelu,
    "hardtanh": _clamp,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "softplus": _softplus,
    "threshold": _threshold,
}
_UNBOUNDED = {
    "glu": "it multiplies one half of its input by a gate of the other, so no bound is known for it; use one of: SiLU, "
    "GELU, Mish",
    "pow": "powers of the input have no largest slope (LPPool takes them too), so no bound is known for it; use one "
    "of: AvgPool, MaxPool, activations of bounded slope",
    **dict.fromkeys(
        (
            "exp",
            "exp2",
            "expm1",
            "square",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "log",
            "log1p",
            "logit",
            "tan",
            "sinh",
            "cosh",
        ),
        "its slope grows without bound, so no bound is known for it; use one of: Softplus, SiLU, Tanh, or other "
        "activations of bounded slope",
    ),
}
ACTIVATIONS = frozenset((*_FIXED, *_RULES, *_UNBOUNDED, *DISCONTINUOUS))  # names that have a rule or a refusal
