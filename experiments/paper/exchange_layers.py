"""Runs at every exchange layer, and which of them `auto` takes before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cells
from material import Measured
from runs import Runs, config_of

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.configured_data import load_data
from asfl_privacy.reporting.records import Record
from asfl_privacy.run import prepare_run


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """As `cells.measure`, and the table `layers`.

    Args:
        fields: Of every run's configuration.
        options: As `cells.measure`; a cell's list of exchange layers is given the automatic one where it lacks it.
        runs: Who trains.
    """
    config, cell = one_cell(config_of({**fields, "method": "asfl", "mech": "none"}), command="a recipe's run")
    automatic = prepare_run(config, cell, data=load_data(config)).cell.exchange_layer
    asked = [
        {**one, "exchange_layer": list(dict.fromkeys([*one["exchange_layer"], automatic]))}
        if "exchange_layer" in one
        else one
        for one in options["cells"]
    ]
    measured = cells.measure(fields, {**options, "cells": asked}, runs=runs)
    names = dict.fromkeys(str(row["exchange_layer"]) for row in measured.rows if row["exchange_layer"] is not None)
    table: list[Record] = [
        {
            "data": config.data,
            "model": config.model,
            "exchange_layer": name,
            "automatic": "yes" if name == automatic else "no",
        }
        for name in names
    ]
    return replace(measured, tables={**measured.tables, "layers": table})
