"""One run: a cell of the grid from configuration to row and run folder."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.statement import statement
from asfl_privacy.accounting.statement_sentences import warnings_of
from asfl_privacy.cells import Cell, Target
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.data_ledger import open_journal
from asfl_privacy.execution import Evaluation, Progress, run_serially
from asfl_privacy.federated import METHODS, Federation, Privacy, TrainingSettings, build_federation
from asfl_privacy.federated.settings import UPDATES_ONLY
from asfl_privacy.mechanisms import choose_placement, make_mechanism
from asfl_privacy.privacy_plan import plan_privacy, planned_notes
from asfl_privacy.reporting import Row, complete_row
from asfl_privacy.run_facts import clients_of_records, facts_of, statement_json

ROW_FILE, CONFIG_FILE, LEDGER_FILE, STATEMENT_FILE = "row.json", "config.toml", "ledger.json", "statement.md"
STATEMENT_JSON_FILE = "statement.json"

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
        federation.split.head,
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
    should_stop: Callable[[], bool] = lambda: False,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> Outcome:
    """Train one prepared cell and write its run folder.

    Args:
        config: The configuration.
        run: From `prepare_run`.
        data: The data set.
        folder: Run folder to write in one step (config.toml, metrics.csv, checkpoint.npz, row.json, and of a
            private run ledger.json and statement.md), or None to write nothing.
        journal: The data set's ledger over all runs, to which this one is added, or None.
        should_stop: Asked before every round.
        on_evaluation: Told of every evaluation.

    Returns:
        Row, statement and warnings.

    Raises:
        ValueError: A phase refused.
        RunStoppedError: `should_stop` said so.
        OSError: The folder cannot be written.
    """
    federation = build_federation(
        data,
        model_name=config.model,
        partition=config.partition,
        settings=training_settings(config, run.cell),
        privacy=run.privacy,
        device=resolve_device(config.device),
    )
    ledger = None
    if run.privacy is not None:
        ledger = Ledger(p=run.privacy.p, radius=run.privacy.radius)
        ledger.clients = clients_of_records(federation)
    result = run_serially(
        federation,
        METHODS[run.cell.method],
        ledger=ledger,
        journal=None if journal is None or ledger is None else open_journal(journal, data=data, ledger=ledger),
        run_id=f"{run.cell.label} seed {run.cell.seed} {secrets.token_hex(8)}",
        should_stop=should_stop,
        on_evaluation=on_evaluation,
    )
    facts = None
    if run.cell.target is not None and run.privacy is not None and ledger is not None:
        facts = facts_of(config, run.cell.target, privacy=run.privacy, federation=federation, result=result)
        ledger.facts = facts.to_dict()
    outcome = Outcome(
        row=_row(config, run, federation=federation, result=result),
        statement="" if facts is None or ledger is None else statement(ledger, facts=facts),
        statement_json="" if facts is None or ledger is None else statement_json(ledger, facts=facts),
        warnings=(UNPROTECTED,) if facts is None or ledger is None else tuple(warnings_of(ledger, facts=facts)),
    )
    if folder is not None:
        _write_folder(folder, config=config, run=run, result=result, outcome=outcome)
    return outcome


def check_writable(folder: Path) -> None:
    """Refuse a run folder that is in use or cannot be written, before time is spent.

    Raises:
        ValueError: Naming the folder and what to do.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out {folder} is in use; give a new folder")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder if folder.exists() else folder.parent):
            pass
    except OSError as error:
        raise ValueError(f"out {folder} cannot be written ({error.strerror}); give a folder that can") from None
    finally:
        for parent in parents:
            with contextlib.suppress(OSError):
                parent.rmdir()


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


def run_config(config: SweepConfig, run: Run) -> SweepConfig:
    """The configuration of this run alone, nothing left to decide; `train --config` repeats the run from it."""
    cell, target = run.cell, run.cell.target
    changes: dict[str, object] = {"method": (cell.method,), "mech": (cell.mech,), "seed": cell.seed, "seeds": 1}
    changes |= {"epsilon": (), "total_epsilon": (), "delta": ()}
    if cell.exchange_layer is not None:
        changes["exchange_layer"] = (cell.exchange_layer,)
    if target is not None:
        changes |= {
            "epsilon": () if target.epsilon is None else (target.epsilon,),
            "total_epsilon": () if target.total_epsilon is None else (target.total_epsilon,),
            "delta": (target.delta,) if target.delta else (),
            "radius": (target.radius,),
            "norm": (target.norm,),
            "placement": (target.placement,),
        }
        if target.placement == UPDATES_ONLY:  # what concerns activations alone has no meaning here
            changes |= {"placement": ("auto",), "labels": "clear", "own": "clean", "planned_releases": None}
    return config.model_copy(update=changes)


def config_toml(config: SweepConfig) -> str:
    """A configuration as TOML that `load_config` reads back; fields without a value are left out."""
    return tomli_w.dumps({key: value for key, value in config.model_dump(mode="json").items() if value is not None})


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
        exchange_layer=cell.exchange_layer or "auto",
    )


def _row(config: SweepConfig, run: Run, *, federation: Federation, result: Progress) -> Row:
    """The run's line of rows.csv; every ε comes from the ledger of what was released."""
    last = result.evaluations[-config.last_evaluations :]
    traffic = result.traffic
    return complete_row(
        {
            **base_row(config, run.cell),
            **_spent(config, run, result=result),
            "status": "ok",
            "accuracy": sum(evaluation.accuracy for evaluation in last) / len(last),
            "remote_fraction": result.remote_fraction,
            "bytes_model": traffic.model,
            "bytes_activations": traffic.activations,
            "bytes_labels": traffic.labels,
            "seconds": round(result.seconds, 3),
        }
    )


def base_row(config: SweepConfig, cell: Cell) -> dict[str, object]:
    """What a row says before anything has run; blank where a column has no meaning."""
    shares = cell.method != "fedavg"
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


def _write_folder(folder: Path, *, config: SweepConfig, run: Run, result: Progress, outcome: Outcome) -> None:
    """Write a run folder under another name and give it its own in one step; row.json, the mark of a whole one, is last.

    An existing empty folder (a mounted volume, say) is filled instead, row.json last.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder if folder.exists() else folder.parent))
    try:
        (scratch / CONFIG_FILE).write_text(config_toml(run_config(config, run)), encoding="utf-8")
        (scratch / "metrics.csv").write_text(_metrics(result), encoding="utf-8")
        if result.ledger is not None:  # an empty account would say that nothing was given away
            result.ledger.save(scratch / LEDGER_FILE)
        if outcome.statement:
            (scratch / STATEMENT_FILE).write_text(outcome.statement, encoding="utf-8")
            (scratch / STATEMENT_JSON_FILE).write_text(outcome.statement_json, encoding="utf-8")
        arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in result.state.weights.items()}
        np.savez(scratch / "checkpoint.npz", **arrays)
        digests = {file.name: file_digest(file) for file in sorted(scratch.iterdir())}
        record = {"row": outcome.row, "warnings": outcome.warnings, "notes": run.notes, "sha256": digests}
        (scratch / ROW_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if folder.exists():
            for name in (*digests, ROW_FILE):
                os.replace(scratch / name, folder / name)  # noqa: PTH105 - one atomic step each
            scratch.rmdir()
        else:
            os.replace(scratch, folder)  # noqa: PTH105 - the atomic rename is the point
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _metrics(result: Progress) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["round", "accuracy", "loss", "sensitivity", "noise_scale"])
    for e in result.evaluations:
        blank = ["" if value is None else repr(value) for value in (e.sensitivity, e.noise_scale)]
        writer.writerow([e.round, repr(e.accuracy), repr(e.loss), *blank])
    return buffer.getvalue()
