"""The worker processes of an executor: started together, heard together, replaced where that is asked for."""

from __future__ import annotations

import random
import selectors
from collections.abc import Callable
from typing import cast

from asfl_privacy.execution.client_process import Done, Failed, Ready
from asfl_privacy.execution.executor import WorkerDiedError
from asfl_privacy.execution.worker_handle import RemoteTraceback, Sent, WorkerHandle, free_cores

RESTARTS = 10
"""How many workers that died are replaced, in all, where failures are tolerated."""

Heard = tuple[Sent, Done | Failed | WorkerDiedError | None]
"""A task and what has become of it; None where the worker died before it came to it."""


class Crew:
    """Worker processes, each with a queue of tasks.

    Args:
        brief: Sends a new worker all that it must know, up to the phase that is going on.
        replace: Whether another worker is started in place of one that died.
        shuffle: Gives answers in a random order.
    """

    def __init__(
        self, brief: Callable[[WorkerHandle], None], *, replace: bool, shuffle: random.Random | None = None
    ) -> None:
        self._brief, self._replaces, self._shuffle = brief, replace, shuffle
        self._selector = selectors.DefaultSelector()
        self._lost: list[Heard] = []
        self._restarts = 0
        self.workers: list[WorkerHandle] = []

    @property
    def is_busy(self) -> bool:
        """Whether a task is out."""
        return bool(self._lost) or any(worker.in_work for worker in self.workers)

    def start(self, count: int) -> None:
        """Start workers, and wait until all are ready.

        Raises:
            ValueError: A worker cannot load what it is given.
            WorkerDiedError: One died.
        """
        for core in free_cores(count):
            self.workers.append(WorkerHandle(core=core))
        for worker in tuple(self.workers):  # all of them are importing by now
            self._introduce(worker)
        while not all(worker.is_ready for worker in self.workers):
            self._listen()

    def tell(self, message: Callable[[WorkerHandle], None]) -> None:
        """Send something to every worker; between phases, when none is busy."""
        for worker in tuple(self.workers):
            try:
                message(worker)
            except OSError:  # its successor has been told all
                self._bury(worker)

    def give(self, worker: WorkerHandle, message: bytes, sent: Sent) -> None:
        """Send a worker a task."""
        worker.in_work.append(sent)
        try:
            worker.send(message)
        except OSError:
            self._bury(worker)

    def hear(self) -> list[Heard]:
        """Wait until something has become of at least one task."""
        heard: list[Heard] = []
        while not heard or (self._shuffle is not None and self.is_busy):
            listened = [] if self._lost else self._listen()  # which may lose some
            heard += self._lost + listened
            self._lost = []
            if not heard and not self.is_busy:  # a new worker is ready, and waits for a task
                break
        if self._shuffle is not None:
            self._shuffle.shuffle(heard)
        return heard

    def end(self, *, at_once: bool) -> None:
        """End all workers: after what they are doing, or at once."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.end(at_once=at_once)

    def _listen(self) -> list[Heard]:
        """What has come by the time that anything has."""
        heard: list[Heard] = []
        for key, _ in self._selector.select():
            worker = cast(WorkerHandle, key.fileobj)
            try:
                message = worker.receive()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if isinstance(message, Ready):
                worker.is_ready = True
            elif not worker.is_ready:
                raise _refused_setup(cast(Failed, message))
            else:
                heard.append((worker.in_work.popleft(), cast("Done | Failed", message)))
        return heard

    def _introduce(self, worker: WorkerHandle) -> None:
        self._selector.register(worker, selectors.EVENT_READ)
        try:
            self._brief(worker)
        except OSError:
            self._bury(worker)

    def _bury(self, worker: WorkerHandle) -> None:
        """Note what a worker that died had in work, and start another in its place where that is asked for.

        Raises:
            WorkerDiedError: It is not asked for, or no use: the worker never was ready, or too many have died.
        """
        self._selector.unregister(worker)
        lost = list(worker.in_work)
        where = f"with client {lost[0].client} of round {lost[0].round} in work" if lost else "with no client in work"
        more = f", and client {', '.join(str(sent.client) for sent in lost[1:])} to come" if lost[1:] else ""
        error = WorkerDiedError(f"worker process {worker.pid} died ({worker.how_it_ended()}) {where}{more}")
        self._restarts += 1
        if not self._replaces or not worker.is_ready or self._restarts > RESTARTS:
            raise error
        if lost:
            error.add_note(f"round {lost[0].round}, client {lost[0].client}")
            self._lost += [(lost[0], error), *((sent, None) for sent in lost[1:])]
        successor = WorkerHandle(core=worker.core)
        self.workers[self.workers.index(worker)] = successor
        self._introduce(successor)


def _refused_setup(failed: Failed) -> ValueError:
    error = ValueError(
        f"a worker process cannot load the network or the method ({failed.kind}: {' '.join(failed.message.split())}): it "
        "imports their modules anew; define them in a module that can be imported, or use executor serial or threads"
    )
    error.__cause__ = RemoteTraceback(failed.trace)
    return error
