"""What a worker process does: one run at a time, whatever goes wrong kept as a failed row."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from _thread import LockType
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from asfl_privacy.accounting import Ledger
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.execution import RunStoppedError
from asfl_privacy.execution.executor import reason_of
from asfl_privacy.folder_lock import FolderInUseError
from asfl_privacy.reporting import Row, complete_row, failed_status, write_atomic
from asfl_privacy.run import Outcome, Run, base_row, epsilon_columns, execute_run
from asfl_privacy.run_files import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    ROW_FILE,
    STATEMENT_FILE,
    file_digest,
)
from asfl_privacy.shared_data import map_data
from asfl_privacy.unfinished import UnfinishedRunError

DIED = "the worker process died (out of memory, or killed)"


PATIENCE_S = 60.0
"""How long a cell waits for a process that still writes it."""


@dataclass(frozen=True)
class _Worker:
    """What a worker process holds for its whole life."""

    stop: Event
    data: Dataset
    is_orphan: threading.Event = field(default_factory=threading.Event)
    busy: LockType = field(default_factory=threading.Lock)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a finished run left, as a report needs it.

    Attributes:
        row: Its row.
        warnings: What a reader must be told.
        statement: What it promises, Markdown; empty without noise.
    """

    row: Row
    warnings: tuple[str, ...]
    statement: str


_worker: _Worker | None = None


def start_worker(stop: Event, data_file: Path) -> None:
    """Make this process a worker: one thread, Ctrl-C left to the parent, the data set mapped.

    Args:
        stop: Set by the parent to end runs between two rounds.
        data_file: File of the data set, written by the parent; all workers share its pages.
    """
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _worker = _Worker(stop=stop, data=map_data(data_file))
    threading.Thread(target=_end_with_parent, args=(_worker,), daemon=True).start()


def run_cell_here(config: SweepConfig, run: Run, folder: Path, journal: Path | None) -> Row:
    """`run_cell` with what this worker process holds."""
    assert _worker is not None
    worker = _worker
    with worker.busy:
        return run_cell(
            config,
            run,
            data=worker.data,
            folder=folder,
            journal=journal,
            should_stop=lambda: worker.stop.is_set() or worker.is_orphan.is_set(),
        )


def _end_with_parent(worker: _Worker) -> None:
    """End this process once its parent is gone: between two rounds where a run is under way, which is kept."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    worker.is_orphan.set()
    with worker.busy:
        os._exit(1)  # nobody is left to tell


def run_cell(
    config: SweepConfig,
    run: Run,
    *,
    data: Dataset,
    folder: Path,
    journal: Path | None,
    should_stop: Callable[[], bool],
) -> Row:
    """One run in a worker; whatever goes wrong becomes a failed row, with the traceback of a bug beside it.

    Args:
        config: The configuration.
        run: The prepared run.
        data: The data set.
        folder: Its run folder.
        journal: The data set's ledger over all runs, or None.
        should_stop: Asked before every round.

    Returns:
        Its row.

    Raises:
        RunStoppedError: `should_stop` said so.
    """
    try:
        kept = kept_record(folder, config=config, run=run)
        if kept is not None:  # its process died between the last file and the answer
            return kept.row
        if folder.exists():  # left by something that was not a finished run: kept, out of the way
            folder.rename(folder.with_name(f"{folder.name}.set-aside-{time.time_ns()}"))
        outcome = _execute_when_free(config, run, data=data, folder=folder, journal=journal, should_stop=should_stop)
    except RunStoppedError:
        raise
    except ValueError as error:  # a phase refused: its line says what to do
        return failed_row(config, run, str(error))
    except Exception as error:  # a bug, a full disk: the sweep goes on, the traceback is kept
        folder.parent.mkdir(parents=True, exist_ok=True)
        remote = getattr(error, "traceback", "")  # of a client's own process
        write_atomic(folder.parent / f"{folder.name}.traceback.txt", f"{traceback.format_exc()}{remote}")
        return failed_row(config, run, reason_of(error))
    return outcome.row


def _execute_when_free(
    config: SweepConfig,
    run: Run,
    *,
    data: Dataset,
    folder: Path,
    journal: Path | None,
    should_stop: Callable[[], bool],
) -> Outcome:
    """Run or go on with a cell; a worker of a parent that was killed may still be ending its round there."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return execute_run(
                config, run, data=data, folder=folder, journal=journal, resume=True, should_stop=should_stop
            )
        except FolderInUseError as error:
            if isinstance(error, UnfinishedRunError) or time.monotonic() > deadline or should_stop():
                raise
        time.sleep(0.2)


def failed_row(config: SweepConfig, run: Run, reason: str) -> Row:
    """The row of a run that failed, with the reason as its status."""
    return complete_row({**base_row(config, run.cell), "status": failed_status(reason)})


def run_folder(out: Path, index: int, run: Run) -> Path:
    """Where a run of a sweep is kept."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-._") else "_" for c in run.cell.label)
    return out / "cells" / f"{index:04d}-{safe[:120]}-seed{run.cell.seed}"


def kept_record(folder: Path, *, config: SweepConfig, run: Run) -> Record | None:
    """What a finished run left, or None where it has not finished.

    Args:
        folder: Its run folder.
        config: The configuration of the sweep.
        run: The run that the folder must hold.

    Raises:
        ValueError: A folder of another run, a file that is missing or has changed since it was written, or a row whose ε
            is not that of the ledger beside it.
    """
    if not (folder / ROW_FILE).is_file():
        return None
    try:
        stored = json.loads((folder / ROW_FILE).read_text(encoding="utf-8"))
        record = Record(row=complete_row(stored["row"]), warnings=tuple(stored["warnings"]), statement="")
        due = {CONFIG_FILE, METRICS_FILE, CHECKPOINT_FILE} | ({LEDGER_FILE} if run.cell.target is not None else set())
        if undigested := sorted(due - set(stored["sha256"])):
            raise ValueError(f"it has no digest of {undigested[0]}")
        for name, digest in stored["sha256"].items():
            if file_digest(folder / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
        asked = complete_row(
            {
                **base_row(config, run.cell),
                **{column: record.row[column] for column in ("status", "accuracy", "personal_accuracy")},
            }
        )
        if any(record.row[column] != value for column, value in asked.items() if value is not None):
            raise ValueError("it holds another run")
        if run.cell.target is not None:
            spent = epsilon_columns(Ledger.load(folder / LEDGER_FILE), delta=run.cell.target.delta)
            if any(record.row[column] != value for column, value in spent.items()):
                raise ValueError("the row's ε is not that of its ledger")
            record = replace(record, statement=(folder / STATEMENT_FILE).read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{folder} is no finished run of this sweep ({error}); delete the folder and resume") from None
    return record
