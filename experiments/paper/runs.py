"""Runs of a recipe on worker processes that stay alive; each one is kept, so that hours of them may add up over days."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from asfl_privacy.cli.one_cell import one_cell
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.configured_data import load_data
from asfl_privacy.data import Dataset
from asfl_privacy.execution.child_processes import child_environment
from asfl_privacy.reporting import Row, complete_row, write_atomic
from asfl_privacy.reporting.cells import run_name
from asfl_privacy.reporting.records import Record
from asfl_privacy.run import prepare_run
from asfl_privacy.run_rows import gather
from asfl_privacy.signals import sigterm_as_interrupt
from asfl_privacy.worker import run_cell

KEPT_FILE = "runs.jsonl"
"""Beside a report: every run that was trained for it, tuning runs too, one a line."""


class OutOfTimeError(Exception):
    """A run was not begun, as the time for runs is over."""


@dataclass(frozen=True)
class Runs:
    """Where runs are kept, and who trains them.

    Attributes:
        folder: One folder a run below it; a run that is there is not trained again.
        pool: Worker processes, one thread each; None trains in this process.
        until: Time of the clock after which no run is begun, or None.
        kept: Row and accuracy curve of finished runs, by digest of what was asked; those of earlier days too.
    """

    folder: Path
    pool: Executor | None
    until: float | None = None
    kept: dict[str, tuple[Row, Sequence[Record]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def start(self, **fields: object) -> Future[Row]:
        """Train one run, unless it is there.

        Args:
            fields: Of the sweep's configuration, one value each.

        Returns:
            Its row, in time; a failed run's says why. `OutOfTimeError` where it was not begun.

        Raises:
            ValueError: A field that breaks its rule.
        """
        config = config_of(fields)
        digest = digest_of(config)
        done: Future[Row] = Future()
        if digest in self.kept:
            done.set_result(self.kept[digest][0])
            return done
        folder = self.folder / f"{config.methods[0]}-{digest}"
        if self.pool is None:
            with self._turn:  # searches run on threads, and one process trains one run at a time
                self._finish(done, lambda: _train(config, folder, self.until), digest, folder)
        else:
            trained = self.pool.submit(_train, config, folder, self.until)
            trained.add_done_callback(lambda ended: self._finish(done, ended.result, digest, folder))
        return done

    def evaluations_of(self, rows: Sequence[Row]) -> list[Record]:
        """Accuracy curves of runs that were started here."""
        wanted = {run_name(row) for row in rows}
        with self._lock:
            kept = list(self.kept.values())
        return [one for row, curve in kept if run_name(row) in wanted for one in curve]

    def save(self, file: Path) -> None:
        """Write down every finished run, those of earlier days too."""
        with self._lock:
            lines = [
                json.dumps({"digest": digest, "row": row, "evaluations": list(curve)})
                for digest, (row, curve) in sorted(self.kept.items())
            ]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(f"{line}\n" for line in lines))

    def _finish(self, done: Future[Row], result: Callable[[], Row], digest: str, folder: Path) -> None:
        """Keep a run that ended well (a failed one is tried again), and only then say that it is done."""
        try:
            row = result()
            if row["status"] == "ok":
                curve = gather([folder]).evaluations
                with self._lock:
                    self.kept[digest] = (row, curve)
        except BaseException as error:  # whatever it is, who waits for the run is told
            done.set_exception(OutOfTimeError() if isinstance(error, CancelledError) else error)
        else:
            done.set_result(row)


@contextlib.contextmanager
def open_runs(
    folder: Path, *, workers: int, kept_in: Path | None = None, minutes: float | None = None
) -> Iterator[Runs]:
    """Worker processes of one thread each, or none with 0.

    Args:
        folder: Where run folders go.
        workers: Their number.
        kept_in: File of runs that are done, read first and written at the end, whatever happened between.
        minutes: No run is begun later than that from now.

    Raises:
        ValueError: A file of runs that cannot be read.
    """
    until = None if minutes is None else time.time() + 60.0 * minutes
    kept = {} if kept_in is None or not kept_in.is_file() else read_kept(kept_in)
    spawn = multiprocessing.get_context("spawn")
    with child_environment(), sigterm_as_interrupt():
        pool = ProcessPoolExecutor(workers, spawn, _start, (list(sys.path),)) if workers else None
        runs = Runs(folder, pool, until, kept)
        try:
            yield runs
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
            if kept_in is not None and runs.kept:
                runs.save(kept_in)


def read_kept(file: Path) -> dict[str, tuple[Row, Sequence[Record]]]:
    """Finished runs as `Runs.save` wrote them.

    Raises:
        ValueError: A line that it would not have written.
    """
    kept: dict[str, tuple[Row, Sequence[Record]]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            stored = json.loads(line)
            kept[stored["digest"]] = (complete_row(stored["row"]), stored["evaluations"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} line {number} is no finished run ({error}); remove that line") from None
    return kept


def config_of(fields: Mapping[str, Any]) -> SweepConfig:
    """The configuration of one run.

    Raises:
        ValueError: A field that breaks its rule.
    """
    return load_config(None, overrides={"seeds": 1, "checkpoint_every": 0, **fields})


def digest_of(config: SweepConfig) -> str:
    """A short name of all that is asked beside the defaults."""
    asked = config.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def rows_of(started: Sequence[Future[Row]]) -> list[Row]:
    """The rows of runs that were started, in their order.

    Raises:
        OutOfTimeError: One was not begun.
    """
    return [one.result() for one in started]


def rows_there(started: Mapping[str, Future[Row]]) -> tuple[list[Row], list[str]]:
    """The rows of runs that were started by name, and the names of those that were not begun."""
    rows, missing = list[Row](), list[str]()
    for name, one in started.items():
        try:
            rows.append(one.result())
        except OutOfTimeError:
            missing.append(name)
    return rows, missing


def _start(path: list[str]) -> None:
    sys.path[:] = path  # a recipe's own data and networks are found as the parent finds them
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End where the parent was killed: what it queued would train on for nobody, beside the next command."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train(config: SweepConfig, folder: Path, until: float | None) -> Row:
    if until is not None and time.time() > until:
        raise OutOfTimeError
    wanted, cell = one_cell(config, command="a recipe's run")
    data = _data(wanted.data, wanted.data_root, wanted.evaluate_on)
    run = prepare_run(wanted, cell, data=data)
    return run_cell(wanted, run, data=data, folder=folder, journal=None, should_stop=lambda: False)


@functools.lru_cache(maxsize=2)  # tuning and comparison take turns
def _data(name: str, root: str, evaluate_on: str) -> Dataset:
    return load_data(load_config(None, overrides={"data": name, "data_root": root, "evaluate_on": evaluate_on}))
