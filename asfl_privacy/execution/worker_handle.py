"""The parent's side of a worker process: how it is started, spoken to and ended, and what its errors become."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.reduction import send_handle

import torch

from asfl_privacy.execution.child_processes import child_environment, interrupts_left_to_parent
from asfl_privacy.execution.client_process import Attach, Failed, Start, work
from asfl_privacy.execution.executor import ClientFailedError
from asfl_privacy.execution.shared_region import SharedRegion

PATIENCE_S = 2.0
"""How long a process may take to end by itself."""


class RemoteTraceback(Exception):  # noqa: N818 - no error of its own: the cause of one
    """The traceback of an exception in a worker process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Sent:
    """A task that a worker has.

    Attributes:
        client: Client number.
        round: Round number.
        at: Slot of what it reads, or None.
        answer_at: Slot of the answer, or None.
    """

    client: int
    round: int
    at: int | None
    answer_at: int | None


class WorkerHandle:
    """A worker process that this one has started.

    Args:
        core: The core that it keeps to, or None.
    """

    def __init__(self, *, core: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        start = Start(
            parent=os.getpid(),
            # Linux would end it with the thread that starts it, which may be gone before the run is.
            ends_with_parent=threading.current_thread() is threading.main_thread(),
            core=core,
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
        )
        self.core = core
        self.is_ready = False
        self.in_work: deque[Sent] = deque()
        self._process = context.Process(target=work, args=(theirs, start), daemon=True)
        with child_environment(), interrupts_left_to_parent():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Number of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """For selectors: readable when an answer has come or the process has ended."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a pickled message.

        Raises:
            OSError: The process has ended.
        """
        self._connection.send_bytes(message)

    def attach(self, name: str, region: SharedRegion, *, private: bool = False) -> None:
        """Have a region mapped.

        Raises:
            OSError: The process has ended.
        """
        self.send(pickle.dumps(Attach(name=name, size=region.size, private=private)))
        send_handle(self._connection, region.descriptor, self.pid)

    def receive(self) -> object:
        """The next answer.

        Raises:
            EOFError, OSError: The process has ended.
        """
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Have the process end by itself once it has done what it is doing."""
        self._connection.close()

    def end(self, *, at_once: bool) -> None:
        """Wait until the process has ended, or end it."""
        self.close()
        if not at_once:
            self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def how_it_ended(self) -> str:
        """In words; the process is ended for certain afterwards."""
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        self.end(at_once=True)
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"{signal.Signals(-code).name}: killed, or out of memory"
        return f"signal {-code}"


def raised(failed: Failed) -> Exception:
    """The exception that a failure in a worker is in this process."""
    if not failed.is_refusal:
        where = "".join(f"{note}: " for note in failed.notes)
        return ClientFailedError(f"{where}{failed.kind}: {failed.message}", traceback=failed.trace)
    error = ValueError(failed.message)
    error.__cause__ = RemoteTraceback(failed.trace)
    return error


def free_cores(workers: int) -> list[int | None]:
    """A core for each worker where they fill those that this process may use, otherwise none.

    With fewer workers than cores, two runs at once would take the same ones.
    """
    if sys.platform != "linux":
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    return list(cores) if len(cores) == workers else [None] * workers
