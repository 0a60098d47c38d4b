"""A sweep: every run of the grid on worker processes, kept as it finishes, and the report of them all."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from asfl_privacy.cells import Cell, make_cells
from asfl_privacy.config import SweepConfig, load_config
from asfl_privacy.data import Dataset
from asfl_privacy.reporting import Row, write_atomic
from asfl_privacy.run import CONFIG_FILE, ROW_FILE, Run, config_toml, prepare_run
from asfl_privacy.worker import failed_row, kept_row, run_cell, run_folder, start_worker

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One run has ended.

    Attributes:
        row: Its row.
        label: What the cell is called.
        done: Runs that are done, those of an earlier part of the sweep included.
        total: All runs of the grid.
        seconds_left: Estimate for the rest, or None before the first has ended.
    """

    row: Row
    label: str
    done: int
    total: int
    seconds_left: float | None


class SweepStoppedError(Exception):
    """The sweep was interrupted; what had ended is kept."""


def prepare_sweep(config: SweepConfig, *, data: Dataset) -> tuple[Run, ...]:
    """Check every cell of the grid before anything is written or trained.

    `auto` is decided once for all seeds and budgets of a setting, from the first seed's initial weights, so that a
    curve compares like with like.

    Args:
        config: The grid.
        data: The data set.

    Returns:
        The runs, in the order of rows.csv.

    Raises:
        ValueError: The first thing wrong with the data, the model, a partition, a placement or a calibration.
    """
    decided: dict[Cell, Run] = {}
    runs: dict[Cell, Run] = {}
    for cell in make_cells(config):
        setting = replace(cell, seed=config.seed)
        if setting not in decided:
            decided[setting] = prepare_run(config, setting, data=data)
        first = decided[setting]
        run = replace(first, cell=replace(first.cell, seed=cell.seed))
        runs.setdefault(run.cell, run)
    return tuple(runs.values())


def run_sweep(
    config: SweepConfig,
    runs: Sequence[Run],
    *,
    data: Dataset,
    out: Path,
    workers: int,
    resume: bool,
    run_info: Mapping[str, object],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Row]:
    """Run what is not done yet, keep each run as it ends, and write the report.

    Args:
        config: The grid.
        runs: From `prepare_sweep`.
        data: The data set; workers are handed a copy.
        out: Folder of the report; run folders go below `cells`.
        workers: Worker processes, one thread each.
        resume: Go on in a folder that holds an interrupted sweep of the same configuration.
        run_info: Provenance, as `write_report` takes it.
        on_progress: Called after every run.

    Returns:
        All rows, in the order of `runs`.

    Raises:
        ValueError: A folder that is in use without `resume`, or that holds another sweep.
        SweepStoppedError: Ctrl-C or SIGTERM; finished runs are kept.
        OSError: The folder cannot be written.

    Guarantee:
        rows.csv depends on configuration and seeds alone, not on the number of workers or on interruptions (but for
        the column `seconds`).
    """
    if workers < 1:
        raise ValueError(f"workers {workers} must be a whole number from 1 on; give for example 2")
    claim_folder(config, out=out, resume=resume)
    rows: dict[int, Row] = {}
    for index, run in enumerate(runs):
        kept = kept_row(run_folder(out, index, run))
        if kept is not None:
            rows[index] = kept
    waiting = [index for index in range(len(runs)) if index not in rows]
    started, kept_before = time.monotonic(), len(rows)
    for index, row in _run_all(config, runs, waiting, data=data, out=out, workers=workers):
        rows[index] = row
        spent = time.monotonic() - started
        left = len(runs) - len(rows)
        on_progress(
            Progress(
                row=row,
                label=runs[index].cell.label,
                done=len(rows),
                total=len(runs),
                seconds_left=spent / (len(rows) - kept_before) * left,
            )
        )
    ordered = [rows[index] for index in range(len(runs))]
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    statement, warnings = _statement(runs, rows=ordered, out=out)
    from asfl_privacy.reporting.report import write_report  # loads the plotting libraries, which workers never need

    write_report(out, rows=ordered, run_info={**run_info, "decided": notes}, statement=statement, warnings=warnings)
    return ordered


def claim_folder(config: SweepConfig, *, out: Path, resume: bool) -> None:
    """Make the sweep's folder, or check that it holds the same sweep.

    Raises:
        ValueError: The folder is in use without `resume`, holds another configuration, or cannot be written.
    """
    stored = out / CONFIG_FILE
    if stored.is_file():
        if not resume:
            raise ValueError(f"out {out} already holds a sweep; add --resume to go on with it, or give another --out")
        if load_config(stored, overrides={}) != config:
            raise ValueError(f"out {out} holds a sweep of another configuration ({stored}); give another --out")
        return
    try:
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"out {out} is not empty and holds no sweep; give a new folder")
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(stored, config_toml(config))
    except OSError as error:
        raise ValueError(f"out {out} cannot be written ({error.strerror}); give a folder that can") from None


def _run_all(
    config: SweepConfig, runs: Sequence[Run], waiting: Sequence[int], *, data: Dataset, out: Path, workers: int
) -> Iterator[tuple[int, Row]]:
    """Yield (index, row) as runs end; a worker that dies fails the runs it may have been in, and the rest go on."""
    left = list(waiting)
    packed = pickle.dumps(data)  # not through shared memory, which containers often keep small
    while left:
        crashed: list[int] = []
        with _one_thread_a_process():
            context = multiprocessing.get_context("spawn")
            stop = context.Event()
            pool = ProcessPoolExecutor(
                min(workers, len(left)), mp_context=context, initializer=start_worker, initargs=(stop, packed)
            )
            futures: dict[Future[Row], int] = {}
            try:
                with _sigterm_as_interrupt():
                    with _children_ignore_interrupts():
                        for index in left:
                            future = pool.submit(run_cell, config, runs[index], run_folder(out, index, runs[index]))
                            futures[future] = index
                    pending = set(futures)
                    while pending:
                        done, pending = wait(pending, return_when=FIRST_COMPLETED)
                        for future in done:
                            index = futures[future]
                            error = future.exception()
                            if isinstance(error, BrokenProcessPool):
                                crashed.append(index)
                                continue
                            left.remove(index)
                            yield index, future.result()
            except KeyboardInterrupt:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                done_now = len(runs) - len(left)
                raise SweepStoppedError(f"{done_now} of {len(runs)} runs are done and kept in {out}") from None
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            pool.shutdown(wait=True)
        if crashed:
            # The pool cannot tell which run killed its process: the first `workers` in line were running.
            for index in sorted(crashed)[:workers]:
                left.remove(index)
                yield index, failed_row(config, runs[index], "the worker process died (out of memory, or killed)")


def _statement(runs: Sequence[Run], *, rows: Sequence[Row], out: Path) -> tuple[str, list[str]]:
    """The statement of the strictest cell of each mechanism, and every warning once."""
    warnings: dict[str, None] = {}
    strictest: dict[str, tuple[float, Path, str]] = {}
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        folder = run_folder(out, index, run)
        if row["status"] != "ok" or run.privacy is None:
            continue
        warnings |= dict.fromkeys(json.loads((folder / ROW_FILE).read_text(encoding="utf-8"))["warnings"])
        epsilon = row["epsilon_total"]
        assert isinstance(epsilon, float)
        name = f"{run.privacy.mechanism}"
        if name not in strictest or epsilon < strictest[name][0]:
            strictest[name] = (epsilon, folder, f"{run.cell.label}, seed {run.cell.seed}")
    if not strictest:
        return "Nothing private was released: these runs promise nothing.", list(warnings)
    parts = []
    for _, folder, title in strictest.values():
        text = (folder / "statement.md").read_text(encoding="utf-8")
        body = text.partition("\n")[2].lstrip("\n")
        parts.append(
            f"**The cell with the least ε: {title}.** Each run's own statement lies in its folder below `cells`; unit, "
            f"adversary, assumptions and what is not covered are the same for all.\n\n{body}"
        )
    return "\n".join(parts), list(warnings)


@contextmanager
def _one_thread_a_process() -> Iterator[None]:
    """Have child processes start with one thread each, whatever the machine offers."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Have processes started now ignore Ctrl-C from their first instant on: it is the parent that ends a sweep."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C while runs are out, where signals can be handled (the main thread)."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
