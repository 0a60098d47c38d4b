"""Methods against each other: each one tuned on validation records, then compared on test records over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from material import Measured
from runs import Runs, rows_there
from tuning import Grid, Trial, tune

from asfl_privacy.reporting.records import Record


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Tune, then train every method with what it was given.

    Args:
        fields: Of every run's configuration.
        options: `methods`, FedAvg among them; `grid` with `lr`, `seeds` and tables of single methods' own fields;
            `seeds` of the comparison; `more_seeds` of ASFL and FedAvg, on whose difference the claim rests; `tuned_as`,
            methods that take what another is given, since they are the same by a theorem that tests prove;
            `own_fields`, tables of fields of single methods, such as how often one is evaluated whose evaluation is dear.
        runs: Who trains.

    Raises:
        ValueError: FedAvg is missing, an option of a method that is not compared, or a method that always failed.
    """
    methods, tuned_as = list(options["methods"]), dict(options.get("tuned_as", {}))
    own_fields = {} if "own_fields" not in options else dict(options["own_fields"])
    grid = dict(options["grid"])
    own = {name: value for name, value in grid.items() if isinstance(value, dict)}
    if "fedavg" not in methods:
        raise ValueError("methods lack fedavg, which the others are compared with; add it")
    strangers = sorted((set(own) | set(tuned_as)) - set(methods))
    if strangers:
        raise ValueError(f"grid.{strangers[0]} is of no method that is compared; leave it out")
    tuned = [method for method in methods if method not in tuned_as]
    chosen, trials = tune(
        tuned,
        grid=Grid(lr=tuple(grid["lr"]), options=own, seeds=grid["seeds"], widenings=options.get("widenings", 3)),
        fields=fields,
        runs=runs,
        own_fields=own_fields,
    )
    chosen |= {method: replace(chosen[other], method=method) for method, other in tuned_as.items()}
    seeds, more = options["seeds"], options.get("more_seeds", 0)
    started = {
        f"{method}, seed {seed}": runs.start(
            **{**fields, **own_fields.get(method, {}), "mech": ["none"], "method": [method]},
            **{"lr": one.lr, **one.options, "seed": seed},
        )
        for seed in range(seeds + more)
        for method, one in chosen.items()
        if seed < seeds or method in ("asfl", "fedavg")
    }
    rows, missing = rows_there(started)
    return Measured(
        rows=rows,
        missing=missing,
        tables={"trials": [_record(one, seeds=grid["seeds"]) for one in trials]},
        decided={"chosen": {method: asdict(one) for method, one in chosen.items()}},
    )


def _record(trial: Trial, *, seeds: int) -> Record:
    options = ", ".join(f"{name} {value}" for name, value in trial.options.items())
    return {
        "method": trial.method,
        "lr": trial.lr,
        "options": options,
        "accuracy": trial.accuracy,
        "seeds": seeds,
    }
