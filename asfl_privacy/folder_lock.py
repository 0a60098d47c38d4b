"""A lock on a folder: one process at a time writes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # stands for "no locks here"


class FolderInUseError(ValueError):
    """A folder that something else writes to, or that holds what must not be overwritten."""


@contextmanager
def locked(folder: Path, *, refusal: str) -> Iterator[None]:
    """Keep other processes out of a folder; the operating system drops the lock when the process ends, however it ends.

    Args:
        folder: An existing folder; the lock is its file `.lock`.
        refusal: What to say where another process holds it.

    Raises:
        FolderInUseError: Another process holds the lock.
    """
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderInUseError(refusal) from None
        yield
