"""The pool: worker processes that run cells, and what happens when one dies or the user stops."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.reporting import Row
from asfl_privacy.run import Run
from asfl_privacy.shared_data import write_data
from asfl_privacy.worker import DIED, failed_row, run_cell_here, run_folder, start_worker

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


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
    with _one_thread_a_process(), sigterm_as_interrupt():
        pool = ProcessPoolExecutor(
            min(processes, len(batch)), mp_context=context, initializer=start_worker, initargs=(stop, data_file)
        )
        try:
            futures: dict[Future[Row], int] = {}
            with _children_ignore_interrupts():
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
    """Have processes started now ignore Ctrl-C from their first instant on: it is the parent that ends a sweep.

    Blocked, not ignored: children inherit the mask, and a Ctrl-C that comes meanwhile reaches the parent afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
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
