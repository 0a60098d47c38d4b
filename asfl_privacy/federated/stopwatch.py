"""Where a round's time goes: seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

Seconds = Mapping[str, float]
"""Seconds by phase."""

PHASES = ("head", "certificate", "noise", "exchange", "tail", "full", "aggregate", "evaluate")
"""What a round's time is divided into; the clients' phases are summed over clients."""


class Stopwatch:
    """Adds up the time of named phases; one for each piece of work, never shared.

    Example:
        >>> watch = Stopwatch()
        >>> with watch.phase("head"):
        ...     total = sum(range(10))
        >>> list(watch.seconds), watch.seconds["head"] >= 0.0
        (['head'], True)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block of code as part of a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_all(self, seconds: Seconds) -> None:
        """Add another piece of work's seconds, phase by phase."""
        for name, value in seconds.items():
            self.add(name, value)
