"""The Ray launcher: the cells of a sweep on the machines of a Ray cluster, or of a local one made for it."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset
from asfl_privacy.ray_cluster import (
    check_machine,
    connected,
    import_ray,
    not_shared,
    package_versions,
    worker_options,
)
from asfl_privacy.reporting import Row
from asfl_privacy.run import Run
from asfl_privacy.run_files import ROW_FILE
from asfl_privacy.shared_data import data_arrays, data_of
from asfl_privacy.shared_folder import SharedFolder, has_answer, shared_folder
from asfl_privacy.signals import sigterm_as_interrupt
from asfl_privacy.worker import DIED, failed_row, run_cell, run_folder

VISIBLE_AFTER_S = 90.0
"""How long a finished run folder may take to show on this machine: network file systems keep old listings a while."""


def run_on_ray(
    config: SweepConfig,
    runs: Sequence[Run],
    waiting: Sequence[int],
    *,
    data: Dataset,
    out: Path,
    workers: int | None,
    journal: Path | None,
) -> Generator[tuple[int, Row], None, None]:
    """Run cells on the workers of a Ray cluster and give each row as its run ends.

    The cluster is found by Ray's own convention: the address in RAY_ADDRESS, else one that `ray start` has started on
    this machine, else a local one for this sweep, without dashboard or usage reports. A worker is an actor with one CPU
    and one thread (and a GPU, where the device asks for one), and runs one cell after another.

    Args:
        config: The configuration.
        runs: All runs of the sweep.
        waiting: Indices of those to run.
        data: The data set; it lies in Ray's object store, once a machine.
        out: The sweep's folder, which every machine must see.
        workers: Most cells at a time; None for as many as the cluster has CPUs, or GPUs, for.
        journal: The data set's ledger over all runs, which every machine must see and be able to lock, or None.

    Yields:
        Index and row of a run that has ended, well or not.

    Raises:
        ValueError: No Ray, no cluster at RAY_ADDRESS, no GPU that the device needs, a machine with other versions of the
            packages, or one that does not see the folder or its locks.
        KeyboardInterrupt: Ctrl-C or SIGTERM; workers stop before their next round, as they do when the iterator is closed.

    Guarantee:
        A row is that of a local worker, but for `seconds` (on a GPU, as far as its arithmetic is the same everywhere). A
        worker that dies costs the cell it was running, no other.
    """
    ray = import_ray()
    if not waiting:
        return
    # A worker runs its cell itself, and what it keeps must not depend on how it was reached.
    config = config.model_copy(update={"launcher": "local"})
    out, journal = out.absolute(), None if journal is None else journal.absolute()
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        stack.enter_context(connected(ray))
        stack.enter_context(sigterm_as_interrupt())  # again: Ray has set its own handler
        options = worker_options(config.device, ray.cluster_resources())
        folders = [stack.enter_context(shared_folder(out, locks=False))]
        if journal is not None:
            folders.append(stack.enter_context(shared_folder(journal.parent, locks=True)))
        slots = min(
            int(ray.cluster_resources()[kind]) for kind in (("CPU", "GPU") if options["num_gpus"] else ("CPU",))
        )
        crew = _Crew(ray, data, folders, options=options, limit=min(workers or slots, len(waiting)))
        try:
            yield from _run_cells(crew, config, runs, deque(waiting), out=out, journal=journal)
        except BaseException:
            crew.stop_runs()
            raise
        finally:
            crew.dismiss()


def _run_cells(
    crew: _Crew, config: SweepConfig, runs: Sequence[Run], queue: deque[int], *, out: Path, journal: Path | None
) -> Generator[tuple[int, Row], None, None]:
    """Hand cells to workers that are free until all have ended."""
    while queue or crew.is_busy:
        crew.hire(len(queue))
        worker, index, row = crew.next_answer()
        if worker is None:  # it died: in its cell, or before it could take one, which then pays for it
            index = queue.popleft() if index is None and queue else index
            if index is not None:
                yield index, failed_row(config, runs[index], DIED)
            continue
        if queue:
            number = queue.popleft()
            crew.give(worker, number, config, runs[number], run_folder(out, number, runs[number]), journal)
        if index is not None and row is not None:
            if row["status"] == "ok":
                _await_file(run_folder(out, index, runs[index]) / ROW_FILE)
            yield index, row


class RayWorker:
    """An actor: runs one cell at a time, and can be told to stop meanwhile."""

    def __init__(self, facts: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        self._data = data_of(facts, arrays)
        self._stop = threading.Event()

    def check(self, folders: Sequence[SharedFolder], versions: Mapping[str, str], answer: str) -> tuple[str, str]:
        """The name of this worker's machine, and what keeps it from running cells; empty if nothing does."""
        return platform.node(), check_machine(folders, versions, answer=answer)

    def stop(self) -> None:
        """End the run between two rounds."""
        self._stop.set()

    def run(self, config: SweepConfig, run: Run, folder: Path, journal: Path | None) -> Row:
        """One cell: see `run_cell`."""
        torch.set_num_threads(1)
        return run_cell(config, run, data=self._data, folder=folder, journal=journal, should_stop=self._stop.is_set)


@dataclass(frozen=True)
class _Asked:
    """What a worker was asked last.

    Attributes:
        worker: Ray's handle of it.
        index: The cell it runs, or None while it starts.
        answer: Name of what it leaves in the folders that it must share, while it starts.
    """

    worker: Any
    index: int | None
    answer: str = ""


class _Crew:
    """The workers of a sweep that were asked something and have not answered yet."""

    def __init__(
        self,
        ray: Any,  # noqa: ANN401
        data: Dataset,
        folders: Sequence[SharedFolder],
        *,
        options: Mapping[str, object],
        limit: int,
    ) -> None:
        facts, arrays = data_arrays(data)
        self._ray, self._folders, self._limit = ray, folders, limit
        self._make = ray.remote(RayWorker).options(max_concurrency=2, max_restarts=0, max_task_retries=0, **options)
        self._facts, self._arrays = facts, ray.put(arrays)
        self._asked: dict[Any, _Asked] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a cell is running."""
        return any(asked.index is not None for asked in self._asked.values())

    def hire(self, cells: int) -> None:
        """Start workers for so many more cells, up to the limit; Ray starts them as CPUs become free."""
        coming = sum(asked.index is None for asked in self._asked.values())
        for _ in range(min(cells - coming, self._limit - len(self._asked))):
            worker, answer = self._make.remote(self._facts, self._arrays), secrets.token_hex(8)
            asked = worker.check.remote(self._folders, package_versions(), answer)
            self._asked[asked] = _Asked(worker=worker, index=None, answer=answer)

    def give(self, worker: Any, index: int, *arguments: object) -> None:  # noqa: ANN401
        """Have a worker that is free run a cell."""
        self._asked[worker.run.remote(*arguments)] = _Asked(worker=worker, index=index)

    def next_answer(self) -> tuple[Any, int | None, Row | None]:
        """Wait for a worker.

        Returns:
            The worker, or None if it has died; its cell, or None if it was starting; and its row, or None without one.

        Raises:
            ValueError: It was starting, and cannot run cells.
            Exception: What its cell raised.
        """
        (done, *_), _ = self._ray.wait(list(self._asked), num_returns=1)
        asked, errors = self._asked[done], self._ray.exceptions
        try:
            answer = self._ray.get(done)
        except errors.RayError as error:
            never_started = getattr(error, "actor_init_failed", False)
            if never_started or (asked.index is None and isinstance(error, errors.RayTaskError)):
                reason = str(error).strip().splitlines()[-1].strip()
                raise ValueError(
                    f"launcher ray: a worker could not start ({reason}); install asfl-privacy and what the sweep uses on "
                    "every machine, as here"
                ) from None
            if isinstance(error, errors.RayTaskError):
                raise error.cause from None
            del self._asked[done]
            return None, asked.index, None
        if asked.index is None:
            machine, wrong = answer
            for folder in self._folders:
                if not wrong and not has_answer(folder, asked.answer):
                    wrong = not_shared(folder, machine, "what it writes there does not show here")
            if wrong:
                raise ValueError(wrong)
        del self._asked[done]
        return asked.worker, asked.index, None if asked.index is None else answer

    def stop_runs(self) -> None:
        """Have every run end before its next round, and wait until all have."""
        running = [ref for ref, asked in self._asked.items() if asked.index is not None]
        for ref in running:
            self._asked[ref].worker.stop.remote()
        if running:
            self._ray.wait(running, num_returns=len(running))

    def dismiss(self) -> None:
        """End the workers."""
        for asked in self._asked.values():
            self._ray.kill(asked.worker)
        self._asked.clear()


def _await_file(file: Path, *, seconds: float = VISIBLE_AFTER_S) -> None:
    """Wait until a file that another machine has written shows here: the report is made from what is on disk.

    Raises:
        OSError: It does not.
    """
    deadline = time.monotonic() + seconds
    while not file.is_file():
        if time.monotonic() > deadline:
            raise OSError(
                f"{file} was written on another machine and does not show here after {seconds:g} s; check the file system, "
                "then go on with --resume"
            )
        time.sleep(0.1)
        os.listdir(file.parents[1])  # noqa: PTH208 - has the system look at the folder anew
