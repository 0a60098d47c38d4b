"""Convergence: gradients, disagreement and drift round by round, and how ‖∇F‖² falls with the number of rounds.

Two measurements. `diagnostics`: on the recipe's data set, each method at its own learning rate. `decay`: on the problem of
`smooth_problem.py`, whose constants are known, with step sizes that the theorem for FedAvg allows.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from material import Measured
from recipe import rate_of
from runs import Runs, config_of
from smooth_problem import SMOOTHNESS, Problem, diagnose_exactly, make_federation
from watching import WatchedExecutor

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.configured_data import load_data
from asfl_privacy.execution import Progress, begin_run, run_rounds
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS, Federation, Method, TrainingSettings
from asfl_privacy.federated.diagnostics import Diagnosis, diagnose
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.weights import Weights
from asfl_privacy.reporting.records import Record, read_records, write_records
from asfl_privacy.run import federation_of, prepare_run

SIZES = tuple(one.name for one in fields_of(Problem))
"""Options of the problem that are its own."""
RUN_SIZES = ("cohort", "tail_steps", "full_steps", "batch_size")
"""Options of the runs on it."""

Diagnose = Callable[[Federation, Weights], Diagnosis]


def measure(fields: Mapping[str, Any], options: Mapping[str, Any], *, runs: Runs) -> Measured:
    """Diagnose every method on the data set, and run FedAvg and others on the smooth problem.

    Args:
        fields: Of every run's configuration on the data set.
        options: `methods` and their `rates` or `lr`; `seeds`; `every`, rounds between diagnoses; `problem`, a table with
            `methods` (FedAvg among them), `horizons` (numbers of rounds), `seeds`, `cohort`, `tail_steps`, `full_steps`,
            `batch_size` and sizes of `smooth_problem.Problem`.
        runs: Who measures, and where what was measured is kept.

    Raises:
        ValueError: A field or option that breaks its rule; nothing has been measured then.
    """
    every, problem = int(options.get("every", 1)), dict(options["problem"])
    if every < 1:
        raise ValueError(f"every {every} must be a whole number from 1 on; give 1 to diagnose after every round")
    if "fedavg" not in problem["methods"] or len(set(problem["horizons"])) < 2:
        raise ValueError(
            f"problem has methods {', '.join(problem['methods'])} and horizons {problem['horizons']}: slopes need fedavg and two "
            "numbers of rounds; add them"
        )
    shared = {name: value for name, value in problem.items() if name not in ("methods", "horizons", "seeds")}
    for name in (*RUN_SIZES, *shared):
        if name not in shared or name not in (*RUN_SIZES, *SIZES):
            raise ValueError(
                f"problem.{name} is {'unknown' if name in shared else 'missing'}; give {', '.join(RUN_SIZES)}, and of "
                f"{', '.join(SIZES)} what is not to be as it is"
            )
    configs = [
        config_of(
            {
                **fields,
                **rate_of(method, options),
                "mech": ["none"],
                "method": [method],
                "seed": seed,
                "evaluate_every": fields["rounds"],  # accuracy is another exhibit's
                "last_evaluations": 1,
            }
        )
        for seed in range(options["seeds"])
        for method in options["methods"]
    ]
    diagnoses = [
        _start(
            runs,
            "diagnostics",
            {**config.model_dump(mode="json", exclude_defaults=True), "every": every},
            _diagnose_one,
        )
        for config in configs
    ]
    decays = [
        _start(
            runs,
            "decay",
            {**shared, "method": method, "seed": seed, "rounds": rounds, "shortest": min(problem["horizons"])},
            _decay_one,
        )
        for seed in range(problem["seeds"])
        for rounds in sorted(problem["horizons"], reverse=True)  # the longest first: the pool ends together
        for method in problem["methods"]
    ]
    tables = {
        "diagnostics": [record for one in diagnoses for record in one.result()],
        "decay": [record for one in decays for record in one.result()],
    }
    return Measured(tables=tables)


def diagnose_run(
    federation: Federation, method: Method, *, executor: str = "auto", every: int = 1, by: Diagnose = diagnose
) -> list[Record]:
    """Train a run and diagnose it before its first round, after each `every` rounds, and after the last.

    Args:
        federation: Clients, network and settings, without privacy.
        method: One that trains a global network.
        executor: Who does the clients' work.
        every: Rounds between diagnoses, ≥ 1.
        by: What diagnoses.

    Returns:
        Records of the table `diagnostics`: gradients at the weights after so many rounds, the drift of the round that led
        there, and the share of remote records drawn so far, beside (τ'/2)/(τ' + τ), the share that sharing plans for.

    Raises:
        ValueError: A method without a global network.
    """
    if not method.has_global_network:
        raise ValueError(
            f"method {method.name} trains no global network, so that it has no global gradient; leave it out"
        )
    settings = federation.settings
    planned = 0.0
    if method.shares:
        planned = 0.5 * settings.tail_steps / (settings.tail_steps + settings.full_steps)
    records: list[Record] = []
    choice = choose_executor(executor, federation, method, workers=1)
    watched = WatchedExecutor(make_executor(choice.name, federation, method), trained=trained_names(federation.model))

    def note(progress: Progress) -> None:
        done = progress.rounds_done
        if done % every and done != settings.rounds:
            return
        found = by(federation, progress.state.weights)
        records.append(
            {
                "method": method.name,
                "seed": settings.seed,
                "round": done,
                "loss": found.loss,
                "squared_gradient_norm": found.squared_gradient_norm,
                "dissimilarity": found.dissimilarity,
                "drift": watched.drift if done else None,
                "remote_fraction": progress.remote_fraction if done else None,
                "planned_remote_fraction": planned,
            }
        )

    with watched as running:
        start = begin_run(federation, ledger=None)
        note(start)
        run_rounds(federation, method, executor=running, start=start, after_round=note)
    return records


def step_size(rounds: int, *, shortest: int, local_steps: int) -> float:
    """η = √(T₁/T) / (16·L·K) on the smooth problem: proportional to 1/√T, and never above what the theorem allows.

    Args:
        rounds: T.
        shortest: T₁, the smallest number of rounds that is compared.
        local_steps: K = τ' + τ.

    Source:
        Karimireddy et al. 2020, Theorem I: FedAvg with server step 1 and η ≤ 1/((1 + B²)·8·L·K), here with B = 1; the mean
        of E‖∇F(x_t)‖² over the rounds is then O(1/√T).

    Example:
        >>> step_size(400, shortest=100, local_steps=4) * 16 * SMOOTHNESS * 4
        0.5
    """
    return math.sqrt(shortest / rounds) / (16.0 * SMOOTHNESS * local_steps)


def decay_record(
    method: str, *, problem: Problem, settings: Mapping[str, int], rounds: int, shortest: int, seed: int
) -> Record:
    """One run on the smooth problem.

    Args:
        method: Name.
        problem: Sizes of the problem.
        settings: What `RUN_SIZES` names.
        rounds: T.
        shortest: T₁, for the step size.
        seed: Of problem and run.

    Returns:
        A record of the table `decay`: means over x_0 … x_{T−1} of ‖∇F‖² and dissimilarity, over the T rounds of drift.
    """
    lr = step_size(rounds, shortest=shortest, local_steps=settings["tail_steps"] + settings["full_steps"])
    federation = make_federation(
        problem,
        TrainingSettings(
            clients=problem.clients,
            cohort=settings["cohort"],
            rounds=rounds,
            tail_steps=settings["tail_steps"],
            full_steps=settings["full_steps"],
            batch_size=settings["batch_size"],
            lr=lr,
            seed=seed,
            evaluate_every=rounds,
            last_evaluations=1,
        ),
    )
    found = diagnose_run(federation, METHODS[method], by=diagnose_exactly)
    return {
        "method": method,
        "seed": seed,
        "rounds": rounds,
        "lr": lr,
        "smoothness": SMOOTHNESS,
        "squared_gradient_norm": _mean(found[:-1], "squared_gradient_norm"),
        "first_squared_gradient_norm": found[0]["squared_gradient_norm"],
        "dissimilarity": _mean(found[:-1], "dissimilarity"),
        "drift": _mean(found[1:], "drift"),
        "remote_fraction": found[-1]["remote_fraction"],
    }


def _mean(records: Sequence[Record], column: str) -> float:
    return statistics.fmean(float(record[column] or 0.0) for record in records)


def _start(
    runs: Runs, table: str, asked: dict[str, Any], work: Callable[[dict[str, Any]], list[Record]]
) -> Future[list[Record]]:
    """Measure in the pool, or here where there is none, unless it is kept already."""
    if runs.pool is not None:
        return runs.pool.submit(_kept, runs.folder, table, asked, work)
    done: Future[list[Record]] = Future()
    done.set_result(_kept(runs.folder, table, asked, work))
    return done


def _kept(
    folder: Path, table: str, asked: dict[str, Any], work: Callable[[dict[str, Any]], list[Record]]
) -> list[Record]:
    """What was measured, read where it lies under a digest of what is asked."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{table}-{digest}.csv"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_records(path, work(asked), table=table)
    return read_records(path, table=table)


def _diagnose_one(asked: dict[str, Any]) -> list[Record]:
    config: SweepConfig = config_of({name: value for name, value in asked.items() if name != "every"})
    wanted, cell = one_cell(config, command="a recipe's run")
    data = load_data(wanted)
    run = prepare_run(wanted, cell, data=data)
    federation = federation_of(wanted, run, data=data)
    return diagnose_run(federation, METHODS[run.cell.method], executor=wanted.executor, every=asked["every"])


def _decay_one(asked: dict[str, Any]) -> list[Record]:
    asked = dict(asked)
    problem = Problem(**{name: asked.pop(name) for name in SIZES if name in asked})
    method, seed, rounds, shortest = (asked.pop(name) for name in ("method", "seed", "rounds", "shortest"))
    return [decay_record(method, problem=problem, settings=asked, rounds=rounds, shortest=shortest, seed=seed)]
