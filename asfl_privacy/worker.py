"""What a worker process does: one run at a time, whatever goes wrong kept as a failed row."""

from __future__ import annotations

import json
import pickle
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.execution import RunStoppedError
from asfl_privacy.reporting import Row, complete_row, failed_status, write_atomic
from asfl_privacy.run import ROW_FILE, Run, base_row, execute_run


@dataclass(frozen=True)
class _Worker:
    """What a worker process holds for its whole life."""

    stop: Event
    data: Dataset


_worker: _Worker | None = None


def start_worker(stop: Event, packed: Path) -> None:
    """Make this process a worker: one thread, Ctrl-C left to the parent, the data set unpacked.

    Args:
        stop: Set by the parent to end runs between two rounds.
        packed: File of the data set, pickled by the parent.
    """
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _worker = _Worker(stop=stop, data=pickle.loads(packed.read_bytes()))


def run_cell(config: SweepConfig, run: Run, folder: Path) -> Row:
    """One run in a worker; whatever goes wrong becomes a failed row, with the traceback of a bug beside it.

    Args:
        config: The configuration.
        run: The prepared run.
        folder: Its run folder.

    Returns:
        Its row.

    Raises:
        RunStoppedError: The parent asked workers to stop.
    """
    assert _worker is not None
    try:
        outcome = execute_run(config, run, data=_worker.data, folder=folder, should_stop=_worker.stop.is_set)
    except RunStoppedError:
        raise
    except ValueError as error:  # a phase refused: its line says what to do
        return failed_row(config, run, str(error))
    except Exception as error:  # a bug, a full disk: the sweep goes on, the traceback is kept
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.parent / f"{folder.name}.traceback.txt", traceback.format_exc())
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        return failed_row(config, run, f"{where}{type(error).__name__}: {error}")
    return outcome.row


def failed_row(config: SweepConfig, run: Run, reason: str) -> Row:
    """The row of a run that failed, with the reason as its status."""
    return complete_row({**base_row(config, run.cell), "status": failed_status(reason)})


def run_folder(out: Path, index: int, run: Run) -> Path:
    """Where a run of a sweep is kept."""
    safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in run.cell.label)
    return out / "cells" / f"{index:04d}-{safe[:120]}-seed{run.cell.seed}"


def kept_row(folder: Path) -> Row | None:
    """The row of a finished run, or None where it has not finished.

    Raises:
        ValueError: A record that cannot be read.
    """
    file = folder / ROW_FILE
    if not file.is_file():
        return None
    try:
        return complete_row(json.loads(file.read_text(encoding="utf-8"))["row"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no finished run ({error}); delete its folder and resume") from None
