"""Rounding onto the lattice g·Z and back, and exact norms of integer rows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asfl_privacy.accounting.checks import check_multiplier
from asfl_privacy.mechanisms.lattice.alias import Integers

LARGEST_CELL = 1 << 61
MAX_EXPONENT = 1000
_LIMB_BITS = 21
_LIMB = (1 << _LIMB_BITS) - 1


def truncate(activations: torch.Tensor | npt.NDArray[np.floating[Any]], *, spacing: float) -> Integers:
    """Round toward zero onto the lattice.

    Args:
        activations: float32 or float64, a tensor on any device or an array, any shape.
        spacing: g, a power of two.

    Returns:
        int64 of the same shape: the integer x/g without its fraction.

    Raises:
        ValueError: for another type, NaN, inf, |x/g| ≥ 2^61, or a spacing that is no power of two.

    Guarantee:
        Exact. No coordinate grows in magnitude, so no q-norm does; and two coordinates move apart by less than g.

    Example:
        >>> truncate(torch.tensor([0.74, -0.74, 3.0]), spacing=0.25).tolist()
        [2, -2, 12]
    """
    exponent = spacing_exponent(spacing)
    if getattr(activations, "dtype", None) not in (torch.float32, torch.float64, np.float32, np.float64):
        kind = getattr(activations, "dtype", type(activations).__name__)
        raise ValueError(f"activations are {kind}: the lattice takes float32 or float64; convert with .float()")
    values = activations.detach().cpu().numpy() if isinstance(activations, torch.Tensor) else np.asarray(activations)
    # in float64 multiplying by a power of two is exact, but for results below 2^-1022, which are truncated to 0 anyway
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cells: npt.NDArray[np.float64] = np.multiply(values, 2.0**-exponent, dtype=np.float64)
        fits = not cells.size or -LARGEST_CELL < cells.min() <= cells.max() < LARGEST_CELL  # NaN is in no interval
    if not fits:
        if not np.isfinite(values).all():
            raise ValueError(
                "activations hold NaN or inf: only finite values have a place on the lattice; check the head"
            )
        raise ValueError(
            f"the largest activation is {np.abs(values).max():g}: at spacing {spacing:g} it is 2^61 cells or more; clip the "
            "activations or widen the spacing"
        )
    return cells.astype(np.int64)  # toward zero, as C casts


def to_float(integers: Integers, *, spacing: float) -> npt.NDArray[np.float32]:
    """The lattice points as float32, correctly rounded (exact below 2^24 cells); post-processing of the integers.

    Args:
        integers: int64, any shape.
        spacing: g, a power of two.

    Returns:
        float32 of the same shape.

    Raises:
        ValueError: for another type, or where float32 overflows.

    Edge cases:
        Below 2^-126 float32 is coarser, so that a result there may be rounded a second time.

    Example:
        >>> to_float(np.array([3, -2]), spacing=0.25).tolist()
        [0.75, -0.5]
    """
    exponent = spacing_exponent(spacing)
    check_integers(integers, largest=1 << 63)
    values: npt.NDArray[np.float32] = integers.astype(np.float32)
    if abs(exponent) <= 62:  # 0 or 1 to 2^63 cells: nothing overflows or underflows, so that the product is exact
        return np.multiply(values, np.float32(2.0**exponent), out=values)
    with np.errstate(over="ignore", under="ignore"):
        np.ldexp(values, exponent, out=values)
    if not np.isfinite(values).all():
        raise ValueError(f"the spacing is {spacing:g}: a lattice point overflows float32; rescale the activations")
    return values


def coarsen(integers: Integers, *, spacing: float, coarse_spacing: float) -> Integers:
    """Round to the nearest point of a coarser lattice, halves up: post-processing that makes the payload smaller.

    Args:
        integers: int64, in cells of ``spacing``, |k| ≤ 2^61.
        spacing: g, a power of two.
        coarse_spacing: g' ≥ g, a power of two.

    Returns:
        int64 of the same shape, in cells of ``coarse_spacing``.

    Raises:
        ValueError: for another type, larger integers, or g' < g.

    Example:
        >>> coarsen(np.array([5, 6, -6, -7]), spacing=1.0, coarse_spacing=4.0).tolist()
        [1, 2, -1, -2]
    """
    check_integers(integers)
    shift = spacing_exponent(coarse_spacing) - spacing_exponent(spacing)
    if shift < 0:
        raise ValueError(
            f"coarse_spacing is {coarse_spacing:g}: it must be at least the spacing {spacing:g}; pass a larger power of two"
        )
    if shift > 62:
        return np.zeros_like(integers)
    return (integers + (1 << shift >> 1)) >> shift


def norm_at_most(integer_rows: Integers, *, norm: float, bound: float, spacing: float) -> npt.NDArray[np.bool_]:
    """Whether each row's exact norm is at most C.

    Args:
        integer_rows: int64, shape (batch, ...), |k| ≤ 2^61, at most 2^20 values a row.
        norm: 1 or 2.
        bound: C > 0, in the units of the activations.
        spacing: g, a power of two.

    Returns:
        bool, shape (batch,).

    Raises:
        ValueError: for another type, norm, bound or size.

    Guarantee:
        Exact: sums of 21-bit limbs and of their products stay below 2^63, and rows are compared as Python integers.

    Example:
        >>> norm_at_most(np.array([[3, 4], [3, 5]]), norm=2, bound=5.0, spacing=1.0).tolist()
        [True, False]
    """
    check_integers(integer_rows)
    limit = Fraction(check_multiplier(bound, name="bound")) / Fraction(2) ** spacing_exponent(spacing)
    if norm not in (1, 2):
        raise ValueError(f"norm is {norm!r}: lattice rows are checked in ℓ1 and ℓ2; pass norm=1 or norm=2")
    if integer_rows.ndim == 0 or math.prod(integer_rows.shape[1:]) > 1 << 20:
        raise ValueError(
            f"rows have shape {integer_rows.shape}: (batch, ...) with at most 2^20 values a row is due; split it"
        )
    rows = np.abs(integer_rows.reshape(integer_rows.shape[0], math.prod(integer_rows.shape[1:])))
    used = range(-(-int(rows.max(initial=0)).bit_length() // _LIMB_BITS))
    limbs = [(rows >> (_LIMB_BITS * i)) & _LIMB for i in used]
    totals = [0] * rows.shape[0]
    terms = [(i, limbs[i]) for i in used] if norm == 1 else [(i + j, limbs[i] * limbs[j]) for i in used for j in used]
    for place, term in terms:  # a product is below 2^42 and a row's sum of 2^20 of them below 2^62
        totals = [t + (s << (_LIMB_BITS * place)) for t, s in zip(totals, term.sum(axis=1).tolist(), strict=True)]
    largest = math.floor(limit if norm == 1 else limit * limit)
    return np.array([total <= largest for total in totals], dtype=np.bool_)


def spacing_exponent(spacing: float) -> int:
    """log2 of a power of two, or raise ValueError.

    Example:
        >>> spacing_exponent(0.25)
        -2
    """
    mantissa, exponent = math.frexp(check_multiplier(spacing, name="spacing"))
    if mantissa != 0.5 or abs(exponent - 1) > MAX_EXPONENT:
        raise ValueError(
            f"spacing is {spacing!r}: it must be a power of two within 2^±{MAX_EXPONENT}, so that scaling is exact; pass e.g. "
            "spacing=2**-8"
        )
    return exponent - 1


def check_integers(integers: Integers, *, largest: int = LARGEST_CELL) -> None:
    """Refuse anything but an int64 array within ±largest."""
    if not isinstance(integers, np.ndarray) or integers.dtype != np.int64:
        kind = getattr(integers, "dtype", type(integers).__name__)
        raise ValueError(f"integers are {kind}: lattice points are numpy int64; call truncate first")
    if integers.size and largest < 1 << 63 and not -largest <= integers.min() <= integers.max() <= largest:
        raise ValueError(
            f"the integers reach beyond ±{largest}: sums would overflow; clip the activations or widen the spacing"
        )
