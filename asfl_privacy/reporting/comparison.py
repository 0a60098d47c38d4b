"""Methods against each other on one task: accuracy over seeds, paired differences, bytes a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy import stats

from asfl_privacy.reporting.cells import Cell
from asfl_privacy.reporting.numerals import exact
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.words import SETTING_NAMES

_TASK: Final = ("data", "partition", "clients", "cohort", "model", "rounds")


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs of runs of the same seed.

    Attributes:
        mean: Mean difference.
        low: Lower end of the confidence interval; −inf for a single pair.
        high: Upper end; inf for a single pair.
        pairs: Number of pairs, ≥ 1.
    """

    mean: float
    low: float
    high: float
    pairs: int


def paired_difference(
    own: Mapping[int, float], other: Mapping[int, float], *, confidence: float = 0.95
) -> Difference | None:
    """Mean of own − other over the seeds that both have, with Student's interval.

    Args:
        own: Value by seed.
        other: Value by seed.
        confidence: Of the two-sided interval, in (0, 1).

    Returns:
        The difference, or None without a seed in common.

    Guarantee:
        The interval covers the true mean with the confidence stated where differences are independent and normal;
        pairing by seed takes out what both runs owe to it (partition, cohort, initial weights).

    Source:
        Student (1908); n − 1 degrees of freedom.

    Example:
        >>> found = paired_difference({0: 0.8, 1: 0.9}, {0: 0.7, 1: 0.8, 2: 0.5})
        >>> round(found.mean, 6), found.pairs
        (0.1, 2)
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence:g} must lie strictly between 0 and 1; give for example 0.95")
    values = [own[seed] - other[seed] for seed in sorted(own) if seed in other]
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Difference(mean, -math.inf, math.inf, 1)
    half = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Difference(mean, mean - half, mean + half, len(values))


def check_task(cells: Sequence[Cell], *, baseline: str) -> tuple[tuple[str, str], ...]:
    """Refuse to compare runs of different tasks.

    Args:
        cells: With or without noise.
        baseline: Method whose runs without noise the others are compared with.

    Returns:
        What all have in common, by name, the number of local steps last.

    Raises:
        ValueError: No cell, no cell of the baseline or more than one, or what `shared_task` refuses.
    """
    shared = shared_task(cells)
    found = [cell for cell in cells if cell.settings["method"] == baseline and not cell.is_noised]
    if len(found) != 1:
        raise ValueError(
            f"{baseline} has {len(found)} cells: differences are to one; give its runs with one learning rate"
        )
    return shared


def shared_task(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """What all cells have in common, by name, the number of local steps last; learning rates may differ.

    Raises:
        ValueError: No cell, or different data, partition, clients, cohort, model, rounds, local steps or records that
            accuracy is of.
    """
    if not cells:
        raise ValueError("no run without noise: a table of methods compares these; finish one of each method first")
    task = {column: _one(cells, column) for column in _TASK}
    steps = {_steps(cell) for cell in cells}
    if len(steps) > 1:
        raise ValueError(
            f"local steps are {', '.join(f'{count:g}' for count in sorted(steps))}: methods are compared at equal steps; give "
            "runs of one number"
        )
    if len({_on_validation(cell) for cell in cells}) > 1:
        raise ValueError("accuracy is of test records here and of validation records there; give runs of one")
    shared = ((SETTING_NAMES[column], exact(value)) for column, value in task.items() if value is not None)
    return (*shared, ("local steps", exact(steps.pop())))


def same_task(cell: Cell, other: Cell) -> bool:
    """Whether `shared_task` would take both: their accuracies may be compared."""
    return (
        all(cell.settings[column] == other.settings[column] for column in _TASK)
        and _steps(cell) == _steps(other)
        and _on_validation(cell) == _on_validation(other)
    )


def reference_of(cell: Cell, cells: Sequence[Cell], *, method: str) -> Cell | None:
    """The cell of a method without noise that a cell is held against, each with its own learning rate.

    Args:
        cell: To compare.
        cells: Among which to look.
        method: Of the reference.

    Returns:
        The one of the same task; of several, where both share activations, those with the same tail steps and exchange
        layer; of several left, those of the same learning rate. None where this does not single out one that has an
        accuracy.
    """
    found = [
        one
        for one in cells
        if not one.is_noised and one.settings["method"] == method and one.accuracy_by_seed and same_task(cell, one)
    ]
    if cell.settings["exchange_layer"] is not None:
        own = [cell.settings[column] for column in ("exchange_layer", "tail_steps")]
        found = [
            one
            for one in found
            if one.settings["exchange_layer"] is None
            or [one.settings[column] for column in ("exchange_layer", "tail_steps")] == own
        ]
    if len(found) > 1:
        found = [one for one in found if one.settings["lr"] == cell.settings["lr"]]
    return found[0] if len(found) == 1 else None


def megabytes_a_round(cell: Cell) -> float | None:
    """10⁶ bytes of all channels and clients in a round, mean over the runs."""
    totals = []
    for run in cell.runs:
        parts = [run[f"bytes_{channel}"] for channel in ("model", "activations", "labels")]
        numbers = [float(part) for part in parts if isinstance(part, int | float)]
        rounds = run["rounds"]
        if len(numbers) < len(parts) or not isinstance(rounds, int) or rounds < 1:
            return None
        totals.append(sum(numbers) / rounds / 1e6)
    return statistics.fmean(totals) if totals else None


def _one(cells: Sequence[Cell], column: str) -> Value:
    values = list(dict.fromkeys(cell.settings[column] for cell in cells))
    if len(values) > 1:
        raise ValueError(
            f"{column} is {' and '.join(str(value) for value in values)}: methods are compared on one task; give runs of one"
        )
    return values[0]


def _steps(cell: Cell) -> float:
    parts = (cell.settings["tail_steps"], cell.settings["full_steps"])
    return float(sum(part for part in parts if isinstance(part, int | float)))


def _on_validation(cell: Cell) -> bool:
    return "evaluate_on validation" in str(cell.settings["options"])
