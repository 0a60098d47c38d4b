"""Fair tuning: every method's learning rate and own options from the same grid, on records held out of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from runs import Runs, rows_of

from asfl_privacy.reporting import Row

TUNING_SEED = 1000
"""First seed of tuning runs, far from those that are reported."""
Options = Mapping[str, float | str]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is tried.

    Attributes:
        lr: Learning rates, rising, in a geometric series; where the best of them is an end, the series goes on there, and
            downward where all of them failed.
        options: Values of single methods' own fields, by method and field, each tried at the learning rate found.
        seeds: Seeds a point.
        widenings: How often the series may go on.
    """

    lr: tuple[float, ...]
    options: Mapping[str, Mapping[str, Sequence[float | str]]]
    seeds: int = 1
    widenings: int = 3


@dataclass(frozen=True)
class Trial:
    """One point of a grid: validation accuracy, the mean over seeds; None where a run failed."""

    method: str
    lr: float
    options: Options
    accuracy: float | None


def tune(
    methods: Sequence[str],
    *,
    grid: Grid,
    fields: Mapping[str, Any],
    runs: Runs,
    own_fields: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, Trial], list[Trial]]:
    """Search each method's grid.

    Args:
        methods: Names.
        grid: What is tried.
        fields: Of the sweep's configuration, which all share.
        runs: Who trains.
        own_fields: Fields of single methods beside these, by method.

    Returns:
        What each method is given, and all that was tried.

    Raises:
        ValueError: A method failed at every point.
    """
    own = own_fields or {}

    def accuracies(method: str, lrs: Sequence[float], choices: Sequence[Options]) -> list[Trial]:
        points = [(lr, options) for lr in lrs for options in choices]
        seeds = range(TUNING_SEED, TUNING_SEED + grid.seeds)
        started = [
            [
                runs.start(
                    **{**fields, **own.get(method, {}), "mech": ["none"], "method": [method]},
                    **{"lr": lr, "evaluate_on": "validation", **options, "seed": seed},
                )
                for seed in seeds
            ]
            for lr, options in points
        ]
        return [
            Trial(method, lr, options, _mean(rows_of(one))) for (lr, options), one in zip(points, started, strict=True)
        ]

    def search(method: str) -> tuple[Trial, list[Trial]]:
        trials = accuracies(method, grid.lr, [{}])
        for _ in range(grid.widenings):
            lrs = sorted(one.lr for one in trials)
            all_failed = all(one.accuracy is None for one in trials)
            further = _beyond(lrs, best=lrs[0] if all_failed else _best(trials, method).lr)
            if further is None:
                break
            trials += accuracies(method, [further], [{}])
        chosen = _best(trials, method)
        for name, values in grid.options.get(method, {}).items():
            tried = accuracies(method, [chosen.lr], [{**chosen.options, name: value} for value in values])
            trials += tried
            chosen = _best([chosen, *tried], method)
        return chosen, trials

    with ThreadPoolExecutor(len(methods)) as searches:
        found = dict(zip(methods, searches.map(search, methods), strict=True))
    chosen = {method: best for method, (best, _) in found.items()}
    return chosen, [trial for _, trials in found.values() for trial in trials]


def _beyond(lrs: Sequence[float], *, best: float) -> float | None:
    """The next rate of the series where the best is an end of it; None inside."""
    if len(lrs) < 2:
        return None
    if best == lrs[0]:
        return float(f"{lrs[0] * lrs[0] / lrs[1]:.3g}")
    return float(f"{lrs[-1] * lrs[-1] / lrs[-2]:.3g}") if best == lrs[-1] else None


def _mean(rows: Sequence[Row]) -> float | None:
    """Mean over the seeds; None where one failed: a rate at which training may diverge is not chosen.

    FedProto has no global network, so its clients' own accuracy counts.
    """
    values = [row["personal_accuracy"] if row["accuracy"] is None else row["accuracy"] for row in rows]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return fmean(numbers) if numbers and len(numbers) == len(rows) else None


def _best(trials: Sequence[Trial], method: str) -> Trial:
    """The most accurate, the first of equals.

    Raises:
        ValueError: All failed.
    """
    good = [one for one in trials if one.accuracy is not None]
    if not good:
        raise ValueError(f"{method} failed at every point of the grid; add smaller learning rates")
    return max(good, key=lambda one: one.accuracy or 0.0)
