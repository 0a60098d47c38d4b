"""Where a round's time goes: seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Seconds = Mapping[str, float]
"""Seconds by phase."""

PHASES = ("head", "certificate", "noise", "exchange", "tail", "full", "aggregate", "evaluate")
"""What a round's time is divided into; the clients' phases are summed over clients."""


class Stopwatch:
    """Adds up the time of named phases; one for each piece of work, never shared.

    Args:
        device: Where the work is done; None for the CPU, or for adding up seconds alone.
        clock: Gives seconds from any fixed moment on.

    Guarantee:
        On CUDA a phase begins once the device has done all that was asked of it before, and ends once it has done what
        the phase asked: a kernel's time is that of the phase that launched it. On the CPU nothing is waited for.

    Example:
        >>> watch = Stopwatch()
        >>> with watch.phase("head"):
        ...     total = sum(range(10))
        >>> list(watch.seconds), watch.seconds["head"] >= 0.0
        (['head'], True)
    """

    def __init__(self, device: torch.device | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._clock = device, clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block of code as part of a phase."""
        self._wait()
        started = self._clock()
        try:
            yield
        finally:
            self._wait()
            self.add(name, self._clock() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_all(self, seconds: Seconds) -> None:
        """Add another piece of work's seconds, phase by phase."""
        for name, value in seconds.items():
            self.add(name, value)

    def _wait(self) -> None:
        """Until the device is idle; a launch returns before its kernel has run."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
