"""Semidefinite bounds on a program: all unit vectors for p = 1, the whole ball for p = 2 and ∞."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sensitivity.rounding import FloatArray
from sensitivity.semidefinite.constraints import IntArray, Windows
from sensitivity.semidefinite.footprints import Footprint, Grids, Reach, leaders
from sensitivity.semidefinite.lifting import BALL_STEPS, STEPS, lifting_flops, multipliers
from sensitivity.semidefinite.program import Program, restricted, values_of
from sensitivity.semidefinite.response import MAX_SIDE, columns_up, norm_up, response_flops

ATTEMPTS = 2.0  # factorisations that one bound takes, as a rule
ENTRY_FLOPS, VISIT_FLOPS = 40.0, 10.0  # work that handling one entry and looking at one stand for
CALLS_FLOPS = 2e7  # work that the many small calls for one constraint of one bound stand for
WINDOWS_CALLS = 15  # times that for windows
COLUMN_FLOPS = 1e6  # likewise for one footprint
Spend = Callable[[float], bool]


def ball_up(program: Program, *, p: float, q: float, spend: Spend) -> float | None:
    """A bound on the largest ‖y‖_q over ‖x‖_p ≤ 1.

    Args:
        program: the program.
        p: 2 or infinity.
        q: 1 or 2.
        spend: takes work if it is left, and says whether it was.

    Returns:
        The bound, rounded up, or None if it does not fit.

    Guarantee: at or above the largest ‖y‖_q.
    """
    if sum(program.sizes) > MAX_SIDE:
        return None
    fast = program.suited()
    if not spend(lifting_flops(fast, steps=BALL_STEPS) + ATTEMPTS * response_flops(fast)):
        return None
    return norm_up(fast, multipliers(fast, p=p, q=q, steps=BALL_STEPS), p=p, q=q)


def unit_vectors_up(program: Program, *, q: float, bounds: FloatArray, grids: Grids | None, spend: Spend) -> float:
    """A bound on the largest ‖y‖_q over unit vectors x.

    Args:
        program: the program, its matrices sparse.
        q: 1 or 2.
        bounds: what is known of each unit vector, shape (num_in,).
        grids: shapes of the program's variables, or None.
        spend: takes work if it is left, and says whether it was.

    Returns:
        The bound, rounded up, never above the largest of `bounds`.

    Guarantee: at or above the largest ‖y‖_q: the unit vector of the largest bound is bounded anew, until it was before
        or the work is spent; a bound found for one holds for all that it leads, and one factorisation serves all that
        reach the same entries.
    """
    best = bounds.copy()
    stored = sum(np.count_nonzero(values_of(A)) for terms in program.reads for A in terms.values())
    if not spend(ENTRY_FLOPS * stored):
        return float(best.max())
    reach = Reach(program)
    middle = reach.footprint(program.num_in // 2)
    if not spend(program.num_in * (COLUMN_FLOPS + ENTRY_FLOPS * middle.size + VISIT_FLOPS * reach.visits(middle))):
        return float(best.max())
    footprints = [reach.footprint(column) for column in range(program.num_in)]
    program, leader = _led(program, grids, footprints)
    alike: dict[bytes, list[int]] = {}
    for column in np.unique(leader):
        alike.setdefault(footprints[column].key, []).append(int(column))
    done, first, paid = set[int](), True, 0
    while True:
        column = int(leader[int(best.argmax())])
        if column in done:
            return float(best.max())
        done.add(column)
        group = np.array(alike[footprints[column].key])
        alone = restricted(program, footprints[column].kept, rows=footprints[column].rows)
        kept = [group, *footprints[column].kept[1:]]
        together = alone if group.size == 1 else restricted(program, kept, rows=footprints[column].rows)
        cost = _group_flops(alone, together)
        if sum(alone.sizes) > MAX_SIDE or (paid == 0 and not spend(cost)):
            return float(best.max())
        paid = max(paid - 1, 0)
        found = columns_up(together, multipliers(alone, p=2.0, q=q, steps=STEPS, fixed=True), q=q)
        if found is None:
            return float(best.max())
        own = np.full(program.num_in, np.inf)
        own[group] = found
        best = np.minimum(best, own[leader])
        if first:  # all that are still larger must follow; where bounds were equal, some of them gain nothing
            others = [members for key, members in alike.items() if key != footprints[column].key]
            paid = sum(bool((best[np.isin(leader, members)] > found.min()).any()) for members in others)
            if not spend(paid * cost):
                if float(np.ptp(bounds)) == 0.0:
                    return float(best.max())
                paid = 0
            first = False


def _led(program: Program, grids: Grids | None, footprints: list[Footprint]) -> tuple[Program, IntArray]:
    """The program and its leaders; with constraints that allow zeros where more entries are led then."""
    leader = leaders(program, grids, footprints)
    if all(constraint.may_vanish for constraint in program.constraints):
        return program, leader
    wider = replace(program, constraints=tuple(constraint.vanishing() for constraint in program.constraints))
    other = leaders(wider, grids, footprints)
    return (wider, other) if np.unique(other).size < np.unique(leader).size else (program, leader)


def _group_flops(alone: Program, together: Program) -> float:
    windows = sum(isinstance(constraint, Windows) for constraint in alone.constraints)
    calls = CALLS_FLOPS * (len(alone.constraints) + WINDOWS_CALLS * windows)
    return calls + lifting_flops(alone, steps=STEPS) + ATTEMPTS * response_flops(together)
