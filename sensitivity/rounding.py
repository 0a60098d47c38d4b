"""Upward rounding: every float that leaves this package is at or above the real number that it stands for.

Error analysis, in one place (u = 2⁻⁵³, the unit roundoff of float64; γ_n = n·u / (1 − n·u)):

1. Scalars. Python's ``+ * / sqrt`` on floats round to nearest. Each helper below compares the rounded result with the
   exact rational, both as integers over a common denominator, and steps to the next float only if it fell below, so the
   result is the least float that is not below the truth.
2. Sums of n non-negative terms, in any order, with or without fused multiply-add: computed ≥ truth·(1 − u)ⁿ⁺ʳ, where
each term took r
   roundings, hence truth ≤ computed·(1 + γ_{n+r}) (Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1
   and §4.2). `inflate` applies that factor. Products can also underflow, which no relative bound covers: arrays are
   scaled by an exact power of two so that their largest entry lies in [½, 1) (`scale_to_unit`; kernel taps that touch
   padding alone are set to 0 before, so that this entry is part of the operator), and what underflows then is below
   2⁻¹⁰⁷⁴ per term against a maximum of at least ¼, far inside one unit u of the inflation.
3. Largest singular values: a computed eigenvalue is only a guess; a Cholesky factorisation certifies it. See
`spectral`.

Source: N. J. Higham (2002), Lemma 3.1 and §4.2; float64 arithmetic per IEEE 754-2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

UNIT_ROUNDOFF = 2.0**-53
FloatArray = NDArray[np.float64]


def require_bound(value: float, *, what: str) -> float:
    """Return `value` if it is a finite number of at least 0, and raise otherwise.

    Args:
        value: a candidate bound.
        what: what the number is, for the message.

    Returns:
        The value itself.

    Raises:
        ValueError: for NaN, an infinity or a negative number.

    Example:
        >>> require_bound(2.0, what="norm")
        2.0
    """
    if not math.isfinite(value) or value < 0.0:
        raise ValueError(
            f"{what} is {value}: a bound is a finite number of at least 0; look for huge, infinite or NaN weights"
        )
    return float(value)


def _refuse_nan(*values: float) -> None:
    for value in values:
        if value != value:
            raise ValueError(f"operands {values} hold NaN: a bound cannot be computed from NaN; look for NaN weights")


def _excess(a: float, b: float, c: float) -> int:
    """An integer with the sign of a·b − c, exactly, for finite numbers: floats are integers over powers of two."""
    (a_top, a_bottom), (b_top, b_bottom) = a.as_integer_ratio(), b.as_integer_ratio()
    c_top, c_bottom = c.as_integer_ratio()
    return a_top * b_top * c_bottom - c_top * a_bottom * b_bottom


def add_up(*terms: float) -> float:
    """Sum of non-negative terms, rounded up; infinity stands for "no bound" and absorbs.

    Example:
        >>> add_up(0.5, 0.25)
        0.75
        >>> add_up(1.0, 1e-30) > 1.0
        True
    """
    _refuse_nan(*terms)
    if any(math.isinf(term) for term in terms):
        return math.inf
    try:
        nearest = math.fsum(terms)  # rounded once, and so is what it misses, whose sign is therefore exact
    except OverflowError:
        return math.inf
    return math.nextafter(nearest, math.inf) if math.fsum((*terms, -nearest)) > 0.0 else nearest


def mul_up(a: float, b: float) -> float:
    """Product of two non-negative numbers, rounded up; 0 times "no bound" (infinity) is 0, as no difference stays none.

    Example:
        >>> mul_up(3.0, 0.5), mul_up(0.0, math.inf)
        (1.5, 0.0)
    """
    _refuse_nan(a, b)
    if a == 0.0 or b == 0.0:
        return 0.0
    if a == 1.0 or b == 1.0:
        return a if b == 1.0 else b
    nearest = a * b
    if math.isinf(nearest):
        return nearest
    return math.nextafter(nearest, math.inf) if _excess(a, b, nearest) > 0 else nearest


def div_up(a: float, b: float) -> float:
    """Quotient a / b of a non-negative number and a positive number, rounded up.

    Raises:
        ValueError: if b is not positive.

    Example:
        >>> div_up(1.0, 4.0), div_up(1.0, 3.0) > 1 / 3
        (0.25, True)
    """
    _refuse_nan(a, b)
    if b <= 0.0:
        raise ValueError(f"divisor {b} is not positive: a bound cannot be divided by it; look for zero scales")
    if a == 0.0 or math.isinf(a) or math.isinf(b):
        return 0.0 if a == 0.0 else (math.inf if math.isinf(a) else math.ulp(0.0))
    nearest = a / b
    if math.isinf(nearest):
        return nearest
    return math.nextafter(nearest, math.inf) if _excess(nearest, b, a) < 0 else nearest


def sqrt_up(a: float) -> float:
    """Square root of a non-negative number, rounded up.

    Example:
        >>> sqrt_up(4.0)
        2.0
        >>> sqrt_up(2.0) ** 2 > 2.0
        True
    """
    _refuse_nan(a)
    if a < 0.0:
        raise ValueError(f"radicand {a} is negative: a square root needs at least 0; this is a defect of the caller")
    if math.isinf(a):
        return math.inf
    nearest = math.sqrt(a)
    return math.nextafter(nearest, math.inf) if _excess(nearest, nearest, a) < 0 else nearest


def norm2_up(values: Iterable[float]) -> float:
    """Euclidean norm of a few non-negative numbers, rounded up.

    Example:
        >>> norm2_up([3.0, 4.0])
        5.0
    """
    listed = list(values)
    return sqrt_up(add_up(*[mul_up(value, value) for value in listed]))


def gamma(num_operations: int) -> float:
    """γ_n = n·u/(1 − n·u), rounded up.

    Raises:
        ValueError: if n is so large that n·u reaches ½.
    """
    error = num_operations * UNIT_ROUNDOFF
    if error >= 0.5:
        raise ValueError(f"{num_operations} operations are too many: n·2^-53 must stay below 1/2; split the operator")
    return div_up(error, 1.0 - error) * (1.0 + 4.0 * UNIT_ROUNDOFF)


def inflate(value: float, *, num_operations: int) -> float:
    """Raise a float64 sum of non-negative terms above the real sum.

    Args:
        value: the computed sum, product or root, at least 0.
        num_operations: an upper bound on the roundings that any one term went through.

    Returns:
        value·(1 + γ_n), rounded up.

    Guarantee: at or above the real value whenever `value` came from at most `num_operations` roundings of non-negative
        terms.

    Example:
        >>> inflate(1.0, num_operations=10) > 1.0
        True
        >>> inflate(0.0, num_operations=10)
        0.0
    """
    return mul_up(value, math.nextafter(1.0 + gamma(num_operations), math.inf))


def scale_to_unit(array: FloatArray) -> tuple[FloatArray, float]:
    """Divide an array by a power of two so that its largest magnitude lies in [½, 1).

    Args:
        array: float64, any shape.

    Returns:
        The scaled array and the power of two; a zero or empty array comes back as it is, with scale 1.

    Raises:
        ValueError: if an entry is NaN or infinite.

    Guarantee: scaled·scale equals the array exactly, except for entries that fall below 2⁻¹⁰⁷⁴ times the largest.

    Example:
        >>> scale_to_unit(np.array([3.0, -1.0]))
        (array([ 0.75, -0.25]), 4.0)
    """
    largest = float(np.max(np.abs(array), initial=0.0))
    if not (math.isfinite(largest) and bool(np.isfinite(array).all())):
        raise ValueError("weights hold NaN or infinity: no bound exists for them; train again or clip the weights")
    if largest == 0.0:
        return array, 1.0
    exponent = min(max(math.frexp(largest)[1], -1000), 1023)
    return np.ldexp(array, -exponent), math.ldexp(1.0, exponent)
