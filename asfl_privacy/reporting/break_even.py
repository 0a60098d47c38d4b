"""Break-even: the smallest measured ε from which on a gain over a reference is certain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from asfl_privacy.reporting.cells import SETTINGS, Cell
from asfl_privacy.reporting.comparison import Difference, paired_difference
from asfl_privacy.reporting.rows import Value

TARGETS: Final = ("target_epsilon", "target_total_epsilon")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Where along measured ε a statement holds.

    Attributes:
        holds_from: The smallest ε at which it holds, and at every larger one measured; None where it fails at the
            largest.
        holds_first: The smallest ε at which it holds at all; None where it never does. Below `holds_from` where it
            fails in between.
        fails_last: The largest ε at which it fails; None where it never does.
    """

    holds_from: float | None
    holds_first: float | None
    fails_last: float | None

    @property
    def is_monotone(self) -> bool:
        """Whether it holds from some ε on and nowhere below."""
        return self.holds_from == self.holds_first


def threshold(measured: Iterable[tuple[float, bool]]) -> Threshold:
    """Walk down from the largest ε for as long as a statement holds.

    Args:
        measured: ε above 0, and whether the statement held there; in any order. Of several at one ε all must hold.

    Returns:
        Measured ε only: nothing is interpolated. An infinite ε is walked over and never returned as a place where it
        holds.

    Raises:
        ValueError: Nothing measured, or an ε that is NaN or not above 0.

    Example:
        >>> found = threshold([(1.0, True), (2.0, False), (4.0, True), (8.0, True)])
        >>> found.holds_from, found.holds_first, found.fails_last
        (4.0, 1.0, 2.0)
    """
    ordered = sorted(measured)
    if not ordered:
        raise ValueError("no ε was measured: a threshold is one of those measured; give at least one")
    for epsilon, _ in ordered:
        if not epsilon > 0:
            raise ValueError(f"ε {epsilon} must be above 0; leave out what has none")
    steps = [(epsilon, all(held for _, held in group)) for epsilon, group in groupby(ordered, key=lambda one: one[0])]
    failed = [epsilon for epsilon, held in steps if not held]
    last = max(failed, default=None)
    holding = [epsilon for epsilon, held in steps if held and math.isfinite(epsilon)]
    from_here = [epsilon for epsilon in holding if last is None or epsilon > last]
    return Threshold(holds_from=min(from_here, default=None), holds_first=min(holding, default=None), fails_last=last)


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Where noised runs are still above a reference.

    Attributes:
        epsilon: Break-even per release, a measured ε; None where there is none.
        epsilon_total: ε total of the cell at `epsilon` (the largest, where several cells are there); None likewise, or
            where it was not recorded.
        difference: To the reference at `epsilon`.
        first: The smallest ε per release at which it holds at all.
        fails_last: The largest ε per release at which it does not hold.
        failed_runs: How many runs failed there, each of which counts as not above.
        measured: All ε per release, growing.
        reason: Why there is none; empty where there is one.
    """

    epsilon: float | None
    epsilon_total: float | None
    difference: Difference | None
    first: float | None
    fails_last: float | None
    failed_runs: int
    measured: tuple[float, ...]
    reason: str

    @property
    def is_monotone(self) -> bool:
        """Whether it holds from `epsilon` on and nowhere below."""
        return self.epsilon == self.first

    @property
    def is_censored(self) -> bool:
        """Whether it holds at every ε measured, so that the true break-even may lie lower."""
        return self.epsilon is not None and self.fails_last is None


def series_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Noised cells that differ in ε alone, one list each, in their order; cells without ε or accuracy are left out."""
    groups: dict[tuple[Value, ...], list[Cell]] = {}
    for cell in cells:
        if cell.is_noised and cell.accuracy_by_seed and cell.largest("epsilon_release"):
            groups.setdefault(tuple(cell.settings[c] for c in SETTINGS if c not in TARGETS), []).append(cell)
    return list(groups.values())


def break_even(
    series: Sequence[Cell], reference: Cell, *, without_noise: Cell | None = None, confidence: float = 0.95
) -> BreakEven:
    """The smallest ε per release from which on noised runs are above a reference, with confidence.

    Args:
        series: Noised cells that differ in ε alone, as from `series_of`.
        reference: Runs that they are paired with by seed.
        without_noise: The same method without noise, to say what can be expected where no ε reaches it.
        confidence: Of the two-sided interval whose lower end must be above 0.

    Returns:
        The ε and the ε total beside it, as measured.

    Raises:
        ValueError: No cells, or cells that differ in more than ε.

    Guarantee:
        The ε is the largest over the seeds of the cell that it names; it is never interpolated. At it and at every
        larger ε measured, the lower end of Student's paired interval is above 0 and no run failed. Going down from the
        largest ε and stopping at the first that fails is testing in a fixed order: the chance that any ε is wrongly
        named is at most (1 − confidence)/2 for a series, whatever their number. `first` carries no such bound.

    Source:
        Student (1908) for each interval; Maurer, Hothorn and Lehmacher (1995) for tests in an order fixed beforehand.
    """
    if not series:
        raise ValueError("no cell with noise: a break-even is one of their ε; give at least one cell")
    for column in SETTINGS:
        if column not in TARGETS and len({cell.settings[column] for cell in series}) > 1:
            raise ValueError(f"{column} differs between the cells: a break-even is over ε alone; give one series")
    found = [(_epsilon(cell), cell, _difference(cell, reference, confidence)) for cell in series]
    steps = [
        (epsilon, difference is not None and difference.low > 0 and not cell.failed)
        for epsilon, cell, difference in found
    ]
    place = threshold(steps)
    at = [(cell, difference) for epsilon, cell, difference in found if epsilon == place.holds_from and difference]
    totals = [cell.largest("epsilon_total") for cell, _ in at]
    known = [total for total in totals if total is not None]
    return BreakEven(
        epsilon=place.holds_from,
        epsilon_total=max(known) if known and len(known) == len(totals) else None,
        difference=min((difference for _, difference in at), key=lambda one: one.low, default=None),
        first=place.holds_first,
        fails_last=place.fails_last,
        failed_runs=sum(len(cell.failed) for epsilon, cell, _ in found if epsilon == place.fails_last),
        measured=tuple(sorted({epsilon for epsilon, _ in steps})),
        reason="" if place.holds_from is not None else _reason(found, reference, without_noise, confidence),
    )


def _reason(
    found: Sequence[tuple[float, Cell, Difference | None]],
    reference: Cell,
    without_noise: Cell | None,
    confidence: float,
) -> str:
    pairs = max((difference.pairs for _, _, difference in found if difference), default=0)
    if pairs < 2:
        return f"{pairs} paired seed{'' if pairs == 1 else 's'}: an interval needs at least two"
    epsilon, largest, difference = max(found, key=lambda one: one[0])
    if largest.failed:
        return "runs failed at the largest ε measured"
    if math.isinf(epsilon) and difference is not None and difference.low > 0:
        return "it is above only where ε is infinite, which promises nothing"
    clean = None if without_noise is None else _difference(without_noise, reference, confidence)
    if clean is None or clean.pairs < 2:
        return "the runs at the largest ε measured are not above it, and none without noise tell what to expect"
    if clean.low > 0:
        return "the same method without noise is above it with that confidence, so a larger ε than those measured may be too"
    return "the same method without noise is not above it with that confidence either, so no ε can be expected to be"


def _difference(cell: Cell, reference: Cell, confidence: float) -> Difference | None:
    return paired_difference(cell.accuracy_by_seed, reference.accuracy_by_seed, confidence=confidence)


def _epsilon(cell: Cell) -> float:
    epsilon = cell.largest("epsilon_release")
    if epsilon is None:
        raise ValueError("epsilon_release is blank in a run: a break-even is one of the ε spent; leave that cell out")
    return epsilon
