"""The package itself, driven as a library, under one of its executors."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from task_data import federation_of, plain_weights, privacy_of, stored_dataset
from workload import Clock, Task, finish, load_records, load_task

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import Progress, RunStoppedError, begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.execution.heap import keep_freed_memory
from asfl_privacy.federated.methods import METHODS


def run(folder: Path, task: Task, clock: Clock, *, executor: str, workers: int) -> Progress:
    """Train; the clock ticks before every round, and the run is stopped before a round too many."""
    federation, method = federation_of(task, stored_dataset(folder, task)), METHODS[task.method]
    privacy = privacy_of(task)
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    reached = begin_run(federation, ledger=ledger)

    def tick() -> bool:
        clock.tick()
        return len(clock.stamps) > task.rounds

    def note(progress: Progress) -> None:
        nonlocal reached
        reached = progress

    with (
        make_executor(executor, federation, method, workers=workers) as entered,
        contextlib.suppress(RunStoppedError),
    ):
        run_rounds(federation, method, executor=entered, start=reached, should_stop=tick, after_round=note)
    return reached


def main(folder: Path, out: Path, executor: str, workers: int) -> None:
    """Run a task."""
    task = load_task(folder)
    clock = Clock(task)
    done = run(folder, task, clock, executor=executor, workers=workers)
    weights, records = plain_weights(dict(done.state.weights)), load_records(folder)
    steps = counted_steps(task, drawn=done.drawn, sizes=[len(labels) for labels in records.labels])
    finish(out, clock=clock, weights=weights, task=task, records=records, steps=steps, versions={})


def counted_steps(task: Task, *, drawn: int, sizes: list[int]) -> int:
    """Steps from the records that they drew; every client must hold a batch or more, or all the same number."""
    batch = {min(size, task.batch_size) for size in sizes}
    if len(batch) != 1:
        raise ValueError(
            f"clients draw batches of {sorted(batch)} records; give tasks whose clients draw equal batches"
        )
    return round(drawn / batch.pop())


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()  # as the command line does
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
