"""The pool: worker processes that run cells, and what happens when one dies or the user stops."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.execution.child_processes import child_environment, interrupts_left_to_parent
from asfl_privacy.reporting import Row
from asfl_privacy.run import Run
from asfl_privacy.shared_data import write_data
from asfl_privacy.signals import sigterm_as_interrupt
from asfl_privacy.worker import DIED, failed_row, run_cell_here, run_folder, start_worker


def run_on_workers(
    config: SweepConfig,
    runs: Sequence[Run],
    waiting: Sequence[int],
    *,
    data: Dataset,
    out: Path,
    workers: int | None,
    journal: Path | None,
) -> Generator[tuple[int, Row], None, None]:
    """Run cells on worker processes and give each row as its run ends.

    A worker that dies (out of memory, killed) does not say which run it was in. The runs that may have been its are
    tried again one at a time, so that exactly the run that kills its process fails.

    Args:
        config: The configuration.
        runs: All runs of the sweep.
        waiting: Indices of those to run.
        data: The data set; workers share one copy.
        out: The sweep's folder.
        workers: Number of processes, one thread each; None for as many as cores.
        journal: The data set's ledger over all runs, or None.

    Yields:
        Index and row of a run that has ended, well or not.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; workers stop before their next round, as they do when the iterator is closed.
    """
    with tempfile.TemporaryDirectory(prefix="asfl-privacy-") as scratch:
        # Through a file: shared memory is often small in containers, and arguments of more than a pipe's buffer would
        # hold up the start of each process until the one before has imported everything.
        data_file = Path(scratch) / "data.safetensors"
        write_data(data, data_file)
        processes = workers if workers is not None else len(os.sched_getaffinity(0))
        yield from _run_batches(config, runs, waiting, data_file=data_file, out=out, workers=processes, journal=journal)


def _run_batches(
    config: SweepConfig,
    runs: Sequence[Run],
    waiting: Sequence[int],
    *,
    data_file: Path,
    out: Path,
    workers: int,
    journal: Path | None,
) -> Generator[tuple[int, Row], None, None]:
    """Run batches of cells, and again one at a time those among which a process died."""
    batches = [(list(waiting), workers)] if waiting else []
    while batches:
        batch, processes = batches.pop()
        left = list(batch)
        for index, row in _run_batch(
            config, runs, batch, data_file=data_file, out=out, processes=processes, journal=journal
        ):
            left.remove(index)
            yield index, row
        if not left:
            continue
        if processes == 1:
            culprit = left.pop(0)
            yield culprit, failed_row(config, runs[culprit], DIED)
            batches.append((left, 1))
        else:
            # Runs start in order, so those that were running are the first ones left.
            batches += [(left[processes:], processes), (left[:processes], 1)]
        batches = [pair for pair in batches if pair[0]]


def _run_batch(
    config: SweepConfig,
    runs: Sequence[Run],
    batch: Sequence[int],
    *,
    data_file: Path,
    out: Path,
    processes: int,
    journal: Path | None,
) -> Generator[tuple[int, Row], None, None]:
    """Give rows until the batch is done or a process has died."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with child_environment(), sigterm_as_interrupt():
        pool = ProcessPoolExecutor(
            min(processes, len(batch)), mp_context=context, initializer=start_worker, initargs=(stop, data_file)
        )
        try:
            futures: dict[Future[Row], int] = {}
            with interrupts_left_to_parent():
                for index in batch:
                    try:
                        future = pool.submit(
                            run_cell_here, config, runs[index], run_folder(out, index, runs[index]), journal
                        )
                    except BrokenProcessPool:  # a process has died already
                        break
                    futures[future] = index
            pending = set(futures)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    if not isinstance(future.exception(), BrokenProcessPool):
                        yield futures[future], future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=True)
