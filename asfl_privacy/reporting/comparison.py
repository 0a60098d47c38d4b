"""Methods against each other on one task: accuracy over seeds, paired differences, bytes a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy import stats

from asfl_privacy.reporting.cells import Cell, gather_cells
from asfl_privacy.reporting.display import Display
from asfl_privacy.reporting.numerals import BLANK, exact, nearest, spread
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.words import SETTING_NAMES, method_name

_TASK: Final = ("data", "partition", "clients", "cohort", "model", "rounds")
_HEADINGS: Final = (
    "method",
    "accuracy %",
    "points above {}",
    "95 % interval",
    "pairs",
    "MB a round",
    "lr",
    "steps and method",
)


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


def compare_methods(rows: Sequence[Mapping[str, object]], *, baseline: str = "fedavg") -> Display:
    """The table of methods: unnoised runs of one task, each method with a learning rate of its own.

    Args:
        rows: Runs; those with noise are left out.
        baseline: Method that the others are compared with, by seed.

    Returns:
        One line a method, the best accuracy first, the baseline's difference blank; what all have in common as
        `shared`.

    Raises:
        ValueError: No run without noise, no run of the baseline or more than one cell of it, or runs of different tasks
            (data, partition, clients, cohort, model, rounds, local steps).

    Guarantee:
        A failed run enters no mean. Differences are in points, own − baseline, positive for a gain.
    """
    cells = [cell for cell in gather_cells(rows) if not cell.is_noised and cell.runs]
    if not cells:
        raise ValueError("no run without noise: a table of methods compares these; finish one of each method first")
    task = {column: _one(cells, column) for column in _TASK}
    steps = {_steps(cell) for cell in cells}
    if len(steps) > 1:
        raise ValueError(
            f"local steps are {', '.join(f'{count:g}' for count in sorted(steps))}: methods are compared at equal steps; give "
            "runs of one number"
        )
    found = [cell for cell in cells if cell.settings["method"] == baseline]
    if len(found) != 1:
        raise ValueError(
            f"{baseline} has {len(found)} cells: differences are to one; give its runs with one learning rate"
        )
    ordered = sorted(cells, key=lambda cell: -statistics.fmean(cell.accuracy_by_seed.values() or [-1.0]))
    headings = tuple(heading.format(method_name(baseline)) for heading in _HEADINGS)
    lines = tuple(_line(cell, found[0]) for cell in ordered)
    shared = tuple((SETTING_NAMES[column], exact(value)) for column, value in task.items() if value is not None)
    return Display(headings=headings, lines=lines, shared=(*shared, ("local steps", exact(steps.pop()))))


def _line(cell: Cell, baseline: Cell) -> tuple[str, ...]:
    accuracies = [100.0 * value for value in cell.accuracy_by_seed.values()]
    mean = statistics.fmean(accuracies) if accuracies else None
    stddev = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    own = None if cell is baseline else paired_difference(cell.accuracy_by_seed, baseline.accuracy_by_seed)
    settings = cell.settings
    return (
        method_name(settings["method"]) + (f", {settings['exchange_layer']}" if settings["exchange_layer"] else ""),
        spread(mean, stddev),
        BLANK if own is None else f"{100 * own.mean:+.1f}",
        BLANK if own is None or own.pairs < 2 else f"{100 * own.low:+.1f} to {100 * own.high:+.1f}",
        BLANK if own is None else str(own.pairs),
        nearest(_megabytes_a_round(cell)),
        exact(settings["lr"]),
        exact(settings["options"]),
    )


def _megabytes_a_round(cell: Cell) -> float | None:
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
