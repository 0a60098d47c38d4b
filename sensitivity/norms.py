"""The norms 1, 2, ∞ and tables of bounds between them.

A table T holds, for r and s in {1, 2, ∞}, a number with ‖f(v) − f(v')‖_s ≤ T[r][s]·‖v − v'‖_r; infinity says "no
bound".
"""

from __future__ import annotations

import math
from typing import Literal

from sensitivity.rounding import add_up, mul_up, sqrt_up

Norm = float | Literal["inf"]
Row = tuple[float, float, float]
NormTable = tuple[Row, Row, Row]

NORMS: tuple[float, float, float] = (1, 2, math.inf)


def norm_name(norm: float) -> str:
    """Name of a norm for messages: "1", "2" or "inf".

    Example:
        >>> norm_name(math.inf)
        'inf'
    """
    return "inf" if math.isinf(norm) else str(int(norm))


def parse_norm(norm: object, *, name: str) -> float:
    """Read a norm given as 1, 2, math.inf or "inf".

    Args:
        norm: what the caller passed.
        name: "p" or "q", for the message.

    Returns:
        1, 2 or math.inf.

    Raises:
        ValueError: for anything else, booleans and NaN included.

    Example:
        >>> parse_norm("inf", name="p")
        inf
    """
    if norm == "inf":
        return math.inf
    if isinstance(norm, int | float) and not isinstance(norm, bool):
        for known in NORMS:
            if norm == known:
                return known
    raise ValueError(
        f"{name}={norm!r} is no norm of this package: {name} must be 1, 2, math.inf or 'inf'; pass one of these"
    )


def parse_pair(p: object, q: object) -> tuple[float, float]:
    """Read the pair of norms (p of the input, q of the output); all nine pairs have bounds.

    Raises:
        ValueError: for an unknown norm.

    Example:
        >>> parse_pair("inf", 2)
        (inf, 2)
    """
    return parse_norm(p, name="p"), parse_norm(q, name="q")


def norm_index(norm: float) -> int:
    """Position of a norm in a table."""
    return NORMS.index(norm)


def change_of_norm(r: float, s: float, *, size: int) -> float:
    """Largest ‖v‖_s / ‖v‖_r over vectors of `size` entries: size^max(0, 1/s − 1/r), rounded up.

    Example:
        >>> change_of_norm(2, 1, size=9), change_of_norm(1, 2, size=9)
        (3.0, 1.0)
    """
    if r <= s:
        return 1.0
    return float(size) if (r, s) == (math.inf, 1) else sqrt_up(float(size))


def lipschitz_table(slope: float, *, size: int) -> NormTable:
    """Table of an elementwise map on `size` entries whose slope never exceeds `slope` in magnitude.

    Example:
        >>> lipschitz_table(2.0, size=4)
        ((2.0, 2.0, 2.0), (4.0, 2.0, 2.0), (8.0, 4.0, 2.0))
    """
    return _table([[mul_up(slope, change_of_norm(r, s, size=size)) for s in NORMS] for r in NORMS])


def repeated_table(table: NormTable, *, copies: int) -> NormTable:
    """Table of an operator that acts on each of several parts of its input alike.

    Args:
        table: norm table of the operator on one part.
        copies: number of parts.

    Returns:
        The table of the whole; exact where the given one is.

    Guarantee: ‖(v_1, …, v_k)‖_s ≤ T·‖(‖w_1‖_r, …, ‖w_k‖_r)‖_s ≤ T·k^max(0, 1/s − 1/r)·‖(w_1, …, w_k)‖_r; rounded up.

    Example:
        >>> repeated_table(lipschitz_table(1.0, size=1), copies=4)[2]
        (4.0, 2.0, 1.0)
    """
    return _table(
        [
            [mul_up(table[i][j], change_of_norm(r, s, size=copies)) for j, s in enumerate(NORMS)]
            for i, r in enumerate(NORMS)
        ]
    )


def tighten(table: NormTable, *, num_in: int, num_out: int) -> NormTable:
    """Replace each entry by the best route through the other norms of the input and of the output.

    Args:
        table: any sound table.
        num_in: entries of the input vector.
        num_out: entries of the output vector.

    Returns:
        A sound table, nowhere above the given one.

    Guarantee: T[r][s] ≤ ‖id‖_{r→r'}·T[r'][s']·‖id‖_{s'→s} for every r', s'; rounded up.
    """
    inputs = [[change_of_norm(r, via, size=num_in) for via in NORMS] for r in NORMS]
    outputs = [[change_of_norm(via, s, size=num_out) for s in NORMS] for via in NORMS]
    half = [[min(mul_up(inputs[r][via], table[via][s]) for via in range(3)) for s in range(3)] for r in range(3)]
    return _table(
        [[min(mul_up(half[r][via], outputs[via][s]) for via in range(3)) for s in range(3)] for r in range(3)]
    )


def between_dual_bounds(column: float, row: float) -> float:
    """√(‖W‖_{1→1}·‖W‖_{∞→∞}), rounded up: a bound on ‖W‖_{2→2} (Riesz–Thorin, or Schur's test).

    Example:
        >>> between_dual_bounds(2.0, 8.0)
        4.0
    """
    return sqrt_up(mul_up(column, row))


def add_rows(rows: list[Row]) -> Row:
    """Sum of rows entry by entry, rounded up."""
    return (
        add_up(*[row[0] for row in rows]),
        add_up(*[row[1] for row in rows]),
        add_up(*[row[2] for row in rows]),
    )


def product_table(outer: NormTable, inner: NormTable) -> NormTable:
    """Norms of a composition: the (min, ×) product over the norm between.

    Example:
        >>> product_table(lipschitz_table(2.0, size=4), lipschitz_table(3.0, size=4)) == lipschitz_table(6.0, size=4)
        True
    """
    return _table([[min(mul_up(inner[r][t], outer[t][s]) for t in range(3)) for s in range(3)] for r in range(3)])


def smaller_table(first: NormTable, second: NormTable) -> NormTable:
    """Entry by entry, the smaller of two bounds."""
    return _table([[min(first[r][s], second[r][s]) for s in range(3)] for r in range(3)])


def scaled_table(table: NormTable, factor: float) -> NormTable:
    """Norms of a map times a number of at most this magnitude, rounded up."""
    return _table([[mul_up(value, factor) for value in row] for row in table])


def added_table(tables: list[NormTable]) -> NormTable:
    """Norms of a sum of maps, rounded up."""
    rows = [add_rows([table[r] for table in tables]) for r in range(3)]
    return rows[0], rows[1], rows[2]


def _table(entries: list[list[float]]) -> NormTable:
    rows = [(row[0], row[1], row[2]) for row in entries]
    return rows[0], rows[1], rows[2]
