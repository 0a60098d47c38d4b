"""Norm tables of normalisation by a record's own statistics: layer, group, instance and RMS norms.

Legend: a group of n entries x; μ and v its mean and variance, ε > 0, s = √(v + ε); u the unit vector of x − μ (or any
one orthogonal to 1, if v = 0); τ = v/(v + ε) in [0, 1); P = I − 11ᵀ/n. The Jacobian of (x − μ)/s is
  J = √((1 − τ)/ε)·(P − τuuᵀ),
symmetric, positive semidefinite and at most P/√ε (as uuᵀ ≤ P). A Lipschitz constant is the largest norm of J, so:
- 2→2 = 1/√ε. A column of P − τuuᵀ has squared length a − τ(2 − τ)q with a = 1 − 1/n and q = u_j² ≤ a, so
  1→2 = 2→∞ = √(a/ε). A diagonal entry is a − τq ≥ 0; one off it is at most 1/n + τ|u_i·u_j|, which is below a: so
  1→∞ = a/√ε.
- ∞→1 of a positive semidefinite matrix is attained as σᵀJσ at a vector of signs, and σᵀPσ = n − (Σσ)²/n, so
  ∞→1 = m/√ε with m = n for even and n − 1/n for odd n; likewise ‖(P − τuuᵀ)σ‖ ≤ ‖Pσ‖, so ∞→2 = 2→1 = √(m/ε).
- 1→1 = ∞→∞: see `largest_column_sum`. The obvious 2a/√ε is too small: n = 256 reaches 1108 at ε = 1e-5.
All these are attained as τ → 0, but the last.
RMS norm x/√(mean x² + ε) has J = √((1 − τ)/ε)·(I − τuuᵀ) with u = x/‖x‖: the same with P replaced by I, so a by 1 and
m by n; its 1→1 has a closed form.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sensitivity.norms import NormTable, product_table, repeated_table
from sensitivity.operators.linear import diagonal_table
from sensitivity.rounding import FloatArray, add_up, div_up, inflate, mul_up, norm2_up, sqrt_up

INTERVALS = 1 << 16  # of τ, over which the largest column sum is bounded one by one


@dataclass(frozen=True, kw_only=True)
class Normalised:
    """A normalisation of one record, as facts.

    Attributes:
        num_groups: groups of entries, each normalised by itself.
        group_size: entries of each group.
        epsilon: ε as the kernel may see it; the smaller of its candidates.
        centred: whether the mean is taken off (all but RMS norm).
        gains: γ per entry, shape (num_groups, group_size), or one row for all groups; None for 1.
    """

    num_groups: int
    group_size: int
    epsilon: float
    centred: bool
    gains: FloatArray | None


def normalisation_table(facts: Normalised) -> NormTable:
    """Norm table of a layer, group, instance or RMS norm with its gains.

    Args:
        facts: what is normalised.

    Returns:
        The table of one record; without gains every entry but a centred 1→1 and ∞→∞ is the Lipschitz constant itself,
        up to rounding.

    Raises:
        ValueError: unless ε is positive and finite.

    Guarantee: every entry is at or above the Lipschitz constant over all records; rounded up.

    Edge cases: a centred group of one entry is constant: its table is 0.

    Example:
        >>> facts = Normalised(num_groups=1, group_size=4, epsilon=0.25, centred=True, gains=None)
        >>> [round(value, 4) for value in normalisation_table(facts)[1]]
        [4.0, 2.0, 1.7321]
    """
    core = core_table(facts.group_size, epsilon=facts.epsilon, centred=facts.centred)
    if facts.gains is None:
        return repeated_table(core, copies=facts.num_groups)
    rows, counts = np.unique(np.abs(facts.gains), axis=0, return_counts=True)
    repeats = facts.num_groups if len(facts.gains) == 1 else 1
    parts = [
        repeated_table(product_table(diagonal_table(row, repeats=1), core), copies=int(count) * repeats)
        for row, count in zip(rows, counts, strict=True)
    ]
    return parts[0] if len(parts) == 1 else block_table(parts)


def core_table(group_size: int, *, epsilon: float, centred: bool) -> NormTable:
    """Norm table of one group without gains; see the module's text.

    Raises:
        ValueError: unless ε is positive and finite.

    Example:
        >>> round(core_table(256, epsilon=1e-5, centred=True)[0][0], 1)
        1108.9
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise ValueError(f"its eps is {epsilon}: no bound exists near records of equal entries; use eps = 1e-5")
    if centred and group_size == 1:
        return ((0.0, 0.0, 0.0),) * 3
    steepest = div_up(1.0, _sqrt_down(epsilon))
    n = float(group_size)
    if centred:
        most = div_up(n - 1.0, n)
        signs = n if group_size % 2 == 0 else div_up(n * n - 1.0, n)
    else:
        most, signs = 1.0, n
    root = mul_up(sqrt_up(most), steepest)
    spread = mul_up(sqrt_up(signs), steepest)
    column = mul_up(_column_sum(group_size, centred=centred), steepest)
    return (
        (column, root, mul_up(most, steepest)),
        (spread, steepest, root),
        (mul_up(signs, steepest), spread, column),
    )


def largest_column_sum(group_size: int) -> float:
    """Bound on the largest ℓ1 norm of a column of √(1 − τ)·(P − τuuᵀ) over all τ and u.

    Args:
        group_size: n, at least 2.

    Returns:
        The bound, rounded up; times 1/√ε it is ‖J‖_{1→1}.

    Guarantee: with D = a − τq the diagonal entry and E the squared length of the column, its ℓ1 norm is at most
        D + √((n−1)(E − D²)) (Cauchy–Schwarz over the other entries), where E − D² = (n−1)/n² + τq(τ − 2/n) − τ²q². Its
        maximum over all real τq is 1 − τ/2 + √(1 − τ + nτ²/4). It is also at most 2a + τ(√n − 1)/2, by the triangle
        inequality, |u_j|·‖u‖₁ − 2u_j² being a quadratic form of that largest eigenvalue. On an interval of τ, the
        factor √(1 − τ) is largest at its left end and a convex function at one of its ends, so the largest of these
        products bounds all.

    Source: own derivation. sensitivity.md §2 gives √(1−t)(A + tB), which is 1419 where this is 1109 (n = 256).

    Example:
        >>> largest_column_sum(2)
        1.0
    """
    n = float(group_size)
    if (math.sqrt(n) - 1.0) / 2.0 <= 1.0 - 1.0 / n:  # n ≤ 7: the second bound falls from the start on
        return mul_up(2.0, div_up(n - 1.0, n))
    ends = np.arange(INTERVALS + 1) / INTERVALS
    first = (1.0 - ends[:-1] / 2.0) + np.sqrt(_square(ends, n))
    second = (2.0 - 2.0 / n) + ends[1:] * ((math.sqrt(n) - 1.0) / 2.0)
    bounds = np.sqrt(1.0 - ends[:-1]) * np.minimum(first, second)
    return inflate(float(bounds.max()), num_operations=32)


def _square(ends: FloatArray, n: float) -> FloatArray:
    """Largest 1 − τ + nτ²/4 on each interval; (1 − τ/2)² + (n − 1)τ²/4 says the same without cancellation."""
    values = (1.0 - ends / 2.0) ** 2 + (n - 1.0) * (ends / 2.0) ** 2
    larger: FloatArray = np.maximum(values[:-1], values[1:])
    return larger


@functools.lru_cache(maxsize=256)
def _column_sum(group_size: int, *, centred: bool) -> float:
    if centred:
        return largest_column_sum(group_size)
    # I − τuuᵀ: 1 + τB with B = (√n − 1)/2, largest at τ = (2B − 1)/(3B), where √(1 − τ)(1 + τB) has this value.
    B = (math.sqrt(group_size) - 1.0) / 2.0
    if B <= 0.5:
        return 1.0
    return max(1.0, inflate(math.sqrt((B + 1.0) / (3.0 * B)) * (2.0 * B + 2.0) / 3.0, num_operations=32))


def block_table(parts: list[NormTable]) -> NormTable:
    """Table of operators that act side by side on the parts of a record.

    Args:
        parts: one table per part.

    Returns:
        The largest entries for p ≤ q; ℓ2 norms of the entries for 2→1 and ∞→2, sums for ∞→1.

    Guarantee: ‖(T_i·v_i)‖_s over ‖v‖_r = 1 is the norm of (T_i) that is dual to the change from r to s (Hölder);
        exact where every part is.

    Example:
        >>> identity = ((1.0, 1.0, 1.0),) * 3
        >>> block_table([identity] * 4)[2]
        (4.0, 2.0, 1.0)
    """
    columns = [[[part[r][s] for part in parts] for s in range(3)] for r in range(3)]
    largest = [[max(columns[r][s]) for s in range(3)] for r in range(3)]
    return (
        (largest[0][0], largest[0][1], largest[0][2]),
        (norm2_up(columns[1][0]), largest[1][1], largest[1][2]),
        (add_up(*columns[2][0]), norm2_up(columns[2][1]), largest[2][2]),
    )


def largest_entry(facts: Normalised) -> float:
    """Largest magnitude of a normalised entry before gains: √(n − 1) centred, √n for RMS norm; rounded up.

    Guarantee: x̂ = √(nτ)·u with u a unit vector, τ < 1, and u_i² ≤ 1 − 1/n where u is orthogonal to 1.

    Example:
        >>> largest_entry(Normalised(num_groups=1, group_size=5, epsilon=1e-5, centred=True, gains=None))
        2.0
    """
    return sqrt_up(float(facts.group_size - 1 if facts.centred else facts.group_size))


def _sqrt_down(value: float) -> float:
    """Square root rounded down."""
    root = math.sqrt(value)
    return root if Fraction(root) ** 2 <= Fraction(value) else math.nextafter(root, 0.0)
