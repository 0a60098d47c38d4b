"""Runs of any settings: lists of a cell are crossed, every combination is trained over seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from asfl_privacy.config import SweepConfig
from asfl_privacy.reporting import Row
from material import Measured
from recipe import rate_of
from runs import Runs, config_of


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Train every cell.

    Args:
        fields: Of every run's configuration.
        options: `cells`, tables of fields whose lists are crossed; `seeds`; `rates` or `lr`.
        runs: Who trains.

    Raises:
        ValueError: A cell that breaks a rule; nothing has been trained then.
    """
    asked = [
        {**fields, **rate_of(one["method"], options), **one, "seed": seed}
        for seed in range(options["seeds"])
        for cell in options["cells"]
        for one in _crossed(cell)
    ]
    for one in asked:
        config_of(one)
    started: dict[SweepConfig, Future[Row]] = {}
    for one in asked:
        config = config_of(one)
        if config not in started:
            started[config] = runs.start(**one)
    return Measured(rows=[one.result() for one in started.values()])


def _crossed(cell: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One combination of the cell's lists after the other."""
    lists = [value if isinstance(value, list) else [value] for value in cell.values()]
    for values in itertools.product(*lists):
        yield dict(zip(cell, values, strict=True))
