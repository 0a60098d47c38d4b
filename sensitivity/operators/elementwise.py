"""Multipliers of elementwise affine maps with constants: scaling, normalisation, batch norm in eval mode."""

# ruff: noqa: ANN401  (arguments of recorded operators have no narrower type)
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sensitivity.operators.activations import cast_candidates
from sensitivity.rounding import UNIT_ROUNDOFF, FloatArray


def constant_multipliers(constant: Any, *, dtype: torch.dtype, divide: bool) -> FloatArray:
    """Magnitudes that x·c or x/c multiplies by, rounded up.

    Args:
        constant: a Python number or a tensor, finite.
        dtype: element type of x; a constant of another type may act as its cast, so the worse of the two counts.
        divide: whether x is divided by the constant.

    Returns:
        float64 multipliers, one per entry of the constant.

    Raises:
        ValueError: for a complex or non-finite constant, and for a division by zero.

    Example:
        >>> constant_multipliers(4.0, dtype=torch.float32, divide=False)
        array([4.])
    """
    if isinstance(constant, torch.Tensor):
        exact = constant.detach().to("cpu", torch.float64).numpy()
        cast = constant.detach().to("cpu", dtype).to(torch.float64).numpy()
        candidates = np.stack([np.abs(exact).ravel(), np.abs(cast).ravel()])
    else:
        candidates = np.array([[value] for value in cast_candidates(constant, dtype)])
    if not bool(np.isfinite(candidates).all()):
        raise ValueError("its constant holds NaN or infinity; use finite constants")
    if not divide:
        largest: FloatArray = candidates.max(axis=0)
        return largest
    smallest = candidates.min(axis=0)
    if bool((smallest == 0.0).any()):
        raise ValueError("it divides by zero, so no bound exists; use constants other than 0")
    exact_quotients = smallest == np.exp2(np.round(np.log2(smallest)))
    with np.errstate(over="ignore"):
        reciprocals = 1.0 / smallest
    quotients: FloatArray = np.where(exact_quotients, reciprocals, np.nextafter(reciprocals, np.inf))
    return quotients


def batch_norm_multipliers(gain: FloatArray | None, *, variance: FloatArray, epsilon: float) -> FloatArray:
    """|γ|/√(var + ε) of batch norm in eval mode, rounded up.

    Args:
        gain: γ, one per channel, or None for 1.
        variance: running variance, one per channel.
        epsilon: ε.

    Returns:
        One multiplier per channel.

    Raises:
        ValueError: if var + ε is not positive.

    Example:
        >>> 2.0 <= float(batch_norm_multipliers(None, variance=np.array([0.25]), epsilon=0.0)[0]) < 2.0 + 1e-14
        True
    """
    shifted = variance + epsilon
    if not bool((shifted > 0.0).all()):
        raise ValueError("its running variance plus eps is not positive, so no bound exists; train again or raise eps")
    magnitudes = np.abs(np.ones_like(variance) if gain is None else gain)
    multipliers = magnitudes / np.sqrt(shifted) * (1.0 + 8.0 * UNIT_ROUNDOFF)
    # Two steps cover the two roundings of a quotient that underflows; only γ = 0 gives 0.
    above = np.nextafter(np.nextafter(multipliers, np.inf), np.inf)
    rounded: FloatArray = np.where(magnitudes == 0.0, 0.0, above)
    return rounded
