"""Signals that ask a run to end: heard between two rounds the first time, at once the second time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C or SIGTERM has come, so that a run ends between two rounds.

    A second one raises KeyboardInterrupt where it comes. Outside the main thread, where signals cannot be handled,
    nothing changes.
    """
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
