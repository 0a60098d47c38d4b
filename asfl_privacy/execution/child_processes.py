"""Child processes: what they are started with, whichever part of the program starts them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
HEAP_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20)}
"""glibc gives what a step frees back to the system until a process has freed something large: a twentieth of its time."""


@contextmanager
def child_environment() -> Iterator[None]:
    """Have processes started now begin with one thread each, whatever the machine offers, and keep freed memory."""
    wanted = dict.fromkeys(THREAD_VARIABLES, "1") | {k: v for k, v in HEAP_VARIABLES.items() if k not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def interrupts_left_to_parent() -> Iterator[None]:
    """Have processes started now leave Ctrl-C to their parent from their first instant on.

    Blocked, not ignored: children inherit the mask, and a Ctrl-C that comes meanwhile reaches this process afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
