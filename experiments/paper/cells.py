"""Runs of any settings: lists of a cell are crossed, every combination is trained over seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from material import Measured
from recipe import rate_of
from runs import Runs, config_of, rows_there

from asfl_privacy.reporting import Row
from asfl_privacy.reporting.cells import run_name


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Train every cell.

    Args:
        fields: Of every run's configuration.
        options: `cells`, tables of fields whose lists are crossed, each with `seeds` of its own where it has any; `seeds`;
            `first_seed`; `rates` or `lr`.
        runs: Who trains.

    Raises:
        ValueError: A cell that breaks a rule; nothing has been trained then.
    """
    first = options.get("first_seed", 0)
    started: dict[str, Future[Row]] = {}
    asked = [
        {**fields, **rate_of(str(one["method"]), options), **one, "seed": seed}
        for cell in options["cells"]
        for one in crossed(cell)
        for seed in range(first, first + cell.get("seeds", options["seeds"]))
    ]
    for one in asked:
        config_of(one)
    for one in sorted(asked, key=lambda one: int(one["seed"])):
        name = ", ".join(f"{key} {value}" for key, value in one.items() if fields.get(key) != value)
        if name not in started:
            started[name] = runs.start(**one)
    rows, missing = rows_there(started)
    unique = {run_name(row): row for row in rows}  # a run that two cells ask for counts once
    return Measured(rows=list(unique.values()), missing=missing)


def crossed(cell: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One combination of a cell's lists after the other, its number of seeds left out."""
    fields = {name: value for name, value in cell.items() if name != "seeds"}
    lists = [value if isinstance(value, list) else [value] for value in fields.values()]
    for values in itertools.product(*lists):
        yield dict(zip(fields, values, strict=True))
