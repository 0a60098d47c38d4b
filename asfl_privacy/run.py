"""One run: a cell of the grid from configuration to row and run folder."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.statement import statement
from asfl_privacy.accounting.statement_sentences import warnings_of
from asfl_privacy.cells import Cell, Target
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.data_ledger import open_journal
from asfl_privacy.execution import Evaluation, Progress, run_rounds
from asfl_privacy.execution.choice import choose_executor, make_executor, sums_in_another_order, within_rank
from asfl_privacy.federated import METHODS, Federation, MethodOptions, Privacy, TrainingSettings, build_federation
from asfl_privacy.federated.schedules import parse_schedule
from asfl_privacy.federated.settings import UPDATES_ONLY
from asfl_privacy.mechanisms import choose_placement, make_mechanism
from asfl_privacy.privacy_plan import plan_privacy, planned_notes
from asfl_privacy.reporting import Row, complete_row
from asfl_privacy.run_facts import clients_of_records, facts_of, statement_json
from asfl_privacy.run_files import run_config, write_run_folder
from asfl_privacy.trackers import open_tracker
from asfl_privacy.unfinished import keep_unfinished

BATCHED = "local steps were batched over clients: sums run in another order than one client after the other"

UNPROTECTED = (
    "Runs without noise protect nothing: what clients share (clean activations, labels, updates) leaves them as it is."
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A cell made ready: everything that `auto` stood for is decided.

    Attributes:
        cell: Exchange layer and placement by name.
        privacy: How releases are made private, or None.
        notes: What was decided, and why, one line each.
    """

    cell: Cell
    privacy: Privacy | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished run.

    Attributes:
        row: Its line of rows.csv.
        statement: What it promises, Markdown; empty without noise.
        statement_json: The same as JSON.
        warnings: What a reader must be told.
    """

    row: Row
    statement: str
    statement_json: str
    warnings: tuple[str, ...]


def prepare_run(config: SweepConfig, cell: Cell, *, data: Dataset) -> Run:
    """Decide what `auto` stands for and check that the cell can run, from initial weights and public constants alone.

    Args:
        config: The configuration.
        cell: One of its cells; its seed gives the initial weights that `auto` looks at.
        data: The data set.

    Returns:
        The run.

    Raises:
        ValueError: Whatever the data, model, split, placement, certificate or calibration refuse.
    """
    notes: list[str] = []
    resolve_device(config.device)
    federation = build_federation(
        data,
        model_name=config.model,
        partition=config.partition,
        settings=training_settings(config, cell),
        privacy=None,
    )
    METHODS[cell.method].check(federation)
    if cell.exchange_layer is not None:
        split = federation.split
        if cell.exchange_layer == "auto":
            notes.append(f"exchange layer {split.exchange_layer}: {split.reason}")
        cell = replace(cell, exchange_layer=split.exchange_layer)
    if cell.target is None:
        return Run(cell=cell, privacy=None, notes=tuple(notes))
    federation.load(federation.initial_weights, training=False)
    target, why = _resolved(cell.target, config=config, federation=federation)
    privacy = plan_privacy(config, target, federation=federation)
    return Run(
        cell=replace(cell, target=target), privacy=privacy, notes=(*notes, *why, *planned_notes(config, privacy))
    )


def _resolved(target: Target, *, config: SweepConfig, federation: Federation) -> tuple[Target, tuple[str, ...]]:
    """The target with its placement by name, and why, where `auto` was asked."""
    if target.placement != "auto":
        return target, ()
    if config.noise == "once":
        return replace(target, placement="input"), ("placement input: noise once can be kept nowhere else",)
    choice = choose_placement(
        federation.head_before_noise(),
        mechanism=target.mech,
        p=target.p,
        radius=target.radius,
        input_shape=federation.input_shape,
        clip=config.clip,
        input_box=federation.data.input_box,
    )
    return replace(target, placement=choice.placement), (f"placement {choice.reason}",)


def execute_run(
    config: SweepConfig,
    run: Run,
    *,
    data: Dataset,
    folder: Path | None,
    journal: Path | None = None,
    workers: int = 1,
    resume: bool = False,
    device: torch.device | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Outcome:
    """Train one prepared cell and write its run folder.

    Args:
        config: The configuration.
        run: From `prepare_run`.
        data: The data set.
        folder: Run folder to write in one step (config.toml, metrics.csv, checkpoint.safetensors, row.json, and of a
            private run ledger.json and statement.md), or None to write nothing. While the run is under way its
            checkpoints lie in a folder beside it.
        journal: The data set's ledger over all runs, to which this one is added, or None.
        workers: Threads or processes that the run may use.
        resume: Whether to go on from the checkpoints beside the folder, where there are any.
        device: Where training runs, where that is not the configuration's word for it: one of several GPUs.
        should_stop: Asked before every round; the run is kept where it stands.
        on_evaluation: Told of every evaluation.
        on_note: Told which executor was chosen, and where the run was resumed from.

    Returns:
        Row, statement and warnings.

    Raises:
        ValueError: A phase refused, or checkpoints that are not this run's.
        RunStoppedError: `should_stop` said so.
        OSError: The folder, or a checkpoint, cannot be written; what was kept before is whole.
    """
    federation, method = federation_of(config, run, data=data, device=device), METHODS[run.cell.method]
    choice = choose_executor(config.executor, federation, method, workers=workers)
    on_note(f"executor {choice.name}: {choice.reason}")
    batched = sums_in_another_order(choice.name, federation, method)
    ledger = None
    if run.privacy is not None:
        ledger = Ledger(p=run.privacy.p, radius=run.privacy.radius)
        ledger.clients = clients_of_records(federation)
    with (
        keep_unfinished(
            config,
            run.cell,
            folder=folder,
            data=data,
            batched=batched,
            fresh_noise=run.privacy is not None and not run.privacy.reproducible,
            journal=journal if ledger is not None else None,
            resume=resume,
        ) as unfinished,
        make_executor(
            choice.name,
            federation,
            method,
            workers=workers,
            tolerate_failures=config.tolerate_failures == "yes",
            compile=config.compile == "yes",
        ) as executor,
    ):
        start = unfinished.begin(
            federation,
            ledger=ledger,
            journal=None if journal is None or ledger is None else open_journal(journal, data=data, ledger=ledger),
            run_id=f"{run.cell.label} seed {run.cell.seed} {secrets.token_hex(8)}",
        )
        for note in unfinished.notes:
            on_note(note)
        if start.rounds_done:
            on_note(f"resumed after round {start.rounds_done} of {config.rounds}")
        with open_tracker(
            config.track,
            folder=folder,
            config=run_config(config, run.cell),
            name=f"{run.cell.label} seed {run.cell.seed}",
            on_warning=on_note,
        ) as tracker:

            def tell(evaluation: Evaluation) -> None:
                tracker.evaluation(evaluation)
                on_evaluation(evaluation)

            for evaluation in start.evaluations:
                tell(evaluation)
            result = run_rounds(
                federation,
                method,
                executor=executor,
                start=start,
                evaluation_threads=workers if choice.name != "serial" else 1,
                should_stop=should_stop,
                on_evaluation=tell,
                after_round=unfinished.after_round,
            )
            unfinished.keep()  # a folder that cannot be written must not cost the last rounds
            outcome = _outcome(config, run, federation=federation, result=result)
            tracker.finish(outcome.row)
            if folder is not None:
                write_run_folder(
                    folder,
                    config=config,
                    cell=run.cell,
                    result=result,
                    row=outcome.row,
                    statement=outcome.statement,
                    statement_json=outcome.statement_json,
                    warnings=outcome.warnings,
                    notes=(*run.notes, *((BATCHED,) if batched else ())),
                )
        unfinished.finish()
    return outcome


def serve_run(config: SweepConfig, run: Run, *, data: Dataset, device: torch.device) -> None:
    """Do this rank's share of a run whose rounds are on rank 0, until that one ends it.

    Args:
        config: The configuration, as on rank 0.
        run: From `prepare_run`, as on rank 0.
        data: The data set.
        device: Where this rank trains.

    Raises:
        WorkerDiedError: Another rank does not answer.
    """
    from asfl_privacy.execution.distributed import serve  # loads torch.distributed

    federation, method = federation_of(config, run, data=data, device=device), METHODS[run.cell.method]
    serve(federation, method, within=within_rank(federation, method))


def federation_of(config: SweepConfig, run: Run, *, data: Dataset, device: torch.device | None = None) -> Federation:
    """The clients and the network of a prepared cell, on the configuration's device or another one."""
    return build_federation(
        data,
        model_name=config.model,
        partition=config.partition,
        settings=training_settings(config, run.cell),
        privacy=run.privacy,
        device=resolve_device(config.device) if device is None else device,
    )


def _outcome(config: SweepConfig, run: Run, *, federation: Federation, result: Progress) -> Outcome:
    """What a finished run says; its ledger is given the facts that its counts do not hold."""
    row, ledger = _row(config, run, result=result), result.ledger
    lost = (_lost(result),) if result.failures else ()
    if run.cell.target is None or run.privacy is None or ledger is None:
        return Outcome(row=row, statement="", statement_json="", warnings=(UNPROTECTED, *lost))
    facts = facts_of(
        config,
        run.cell.target,
        method=METHODS[run.cell.method],
        privacy=run.privacy,
        federation=federation,
        result=result,
    )
    ledger.facts = facts.to_dict()
    return Outcome(
        row=row,
        statement=statement(ledger, facts=facts),
        statement_json=statement_json(ledger, facts=facts),
        warnings=(*warnings_of(ledger, facts=facts), *lost),
    )


def _lost(result: Progress) -> str:
    first = result.failures[0]
    return (
        f"{len(result.failures)} times a client's work failed and the round went on without it, first: {first.reason}. "
        "Which clients fail may depend on their records, and no ε covers that."
    )


def resolve_device(device: str) -> torch.device:
    """The torch device that a configuration's `device` names.

    Raises:
        ValueError: A device that this machine does not have.
    """
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        device = next(name for name in ("cuda", "mps", "cpu") if has[name])
    if not has[device]:
        raise ValueError(f"device {device!r} is not on this machine; use auto or cpu")
    return torch.device(device)


def training_settings(config: SweepConfig, cell: Cell) -> TrainingSettings:
    """Sizes and rates of a cell's run."""
    return TrainingSettings(
        clients=config.clients,
        cohort=config.cohort,
        rounds=config.rounds,
        tail_steps=config.tail_steps,
        full_steps=config.full_steps,
        batch_size=config.batch_size,
        lr=config.lr,
        seed=cell.seed,
        evaluate_every=config.evaluate_every,
        last_evaluations=config.last_evaluations,
        exchange_layer=cell.exchange_layer,
        precision=config.precision,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        schedule=parse_schedule(config.lr_schedule),
        options=MethodOptions(**{name: getattr(config, name) for name in METHOD_OPTIONS}),
    )


def _row(config: SweepConfig, run: Run, *, result: Progress) -> Row:
    """The run's line of rows.csv; every ε comes from the ledger of what was released."""
    last = result.evaluations[-config.last_evaluations :]
    traffic = result.traffic
    return complete_row(
        {
            **base_row(config, run.cell),
            **_spent(config, run, result=result),
            "status": "ok",
            "accuracy": _mean([evaluation.accuracy for evaluation in last]),
            **{name: _mean([evaluation.measures.get(name) for evaluation in last]) for name in last[-1].measures},
            "remote_fraction": result.remote_fraction,
            "bytes_model": traffic.model,
            "bytes_activations": traffic.activations,
            "bytes_labels": traffic.labels,
            "seconds": round(result.seconds, 3),
        }
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where any value is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


METHOD_OPTIONS = tuple(field.name for field in fields(MethodOptions))
OPTIONS = ("evaluate_on", "lr_schedule", "momentum", "weight_decay", *METHOD_OPTIONS)
"""Fields that a row names where they are not the default."""


def options_in_words(config: SweepConfig, cell: Cell) -> str | None:
    """What is asked of local steps and methods beside the learning rate; None where nothing is."""
    noised = cell.target is not None and METHODS[cell.method].shares
    names = (*OPTIONS, "noisy_training") if noised else OPTIONS
    defaults = SweepConfig.model_fields
    asked = [(name, getattr(config, name)) for name in names if getattr(config, name) != defaults[name].default]
    return (
        ", ".join(f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in asked) or None
    )


def base_row(config: SweepConfig, cell: Cell) -> dict[str, object]:
    """What a row says before anything has run; blank where a column has no meaning."""
    shares = METHODS[cell.method].shares
    row: dict[str, object] = {
        "method": cell.method,
        "data": config.data,
        "partition": config.partition,
        "clients": config.clients,
        "cohort": config.cohort,
        "model": config.model,
        "mech": cell.mech,
        "exchange_layer": cell.exchange_layer,
        "seed": cell.seed,
        "rounds": config.rounds,
        "tail_steps": config.tail_steps if shares else 0,
        "full_steps": config.full_steps if shares else config.tail_steps + config.full_steps,
        "lr": config.lr,
        "options": options_in_words(config, cell),
    }
    target = cell.target
    if target is not None:
        row |= {
            "target_epsilon": target.epsilon,
            "target_total_epsilon": target.total_epsilon,
            "delta": target.delta,
            "radius": target.radius,
            "p": target.p,
            "q": make_mechanism(target.mech, scale=1.0).norm,
            "placement": target.placement,
            "noise": config.noise,
            "own": config.own,
            "labels": config.labels,
            "updates": config.updates,
            "calibration": config.calibration,
            "reproducible": config.reproducible,
        }
        if target.placement == UPDATES_ONLY:
            row |= {"q": 2.0, "noise": None, "own": None, "labels": None}
    return row


def _spent(config: SweepConfig, run: Run, *, result: Progress) -> dict[str, object]:
    """Noise and ε columns; none without privacy."""
    target, privacy = run.cell.target, run.privacy
    if target is None or privacy is None or result.ledger is None:
        return {}
    spent, plan = epsilon_columns(result.ledger, delta=target.delta), result.largest_plan
    if plan is not None:  # the noise multiplier is fixed, so the round with the most noise has the largest sensitivity
        spent |= {"sensitivity": plan.sensitivity, "noise_scale": plan.scale, "noise_stddev": plan.noise_stddev}
    if config.calibration == "paper":
        spent["epsilon_claimed"] = target.epsilon
    return spent | {"update_multiplier": privacy.update_multiplier, "held_back": result.held_back}


def epsilon_columns(ledger: Ledger, *, delta: float) -> dict[str, object]:
    """The ε columns of a row, from the ledger of what was released."""
    return {
        "epsilon_release": ledger.largest_release(delta=delta),
        "epsilon_total": ledger.epsilon(delta=delta).high,
        "delta_total": ledger.delta_used(delta),
        "epsilon_whole_record": ledger.epsilon(delta=delta, distance=math.inf).high,
        "epsilon_client": ledger.epsilon(delta=delta, unit="client").high,
        **{
            f"epsilon_{channel}": ledger.epsilon(delta=delta, channel=channel).high
            for channel in ("activations", "labels", "updates")
            if channel in ledger.channels
        },
    }
