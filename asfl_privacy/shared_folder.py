"""Whether another machine sees the folder that this one does, writes to it, and respects the locks in it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # stands for "no locks here"


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder in which this machine keeps a token for others to find; made by `shared_folder`.

    Attributes:
        path: The folder, absolute.
        token: What the token file says, and part of its name.
        locks: Whether the token file is locked, which others must notice.
    """

    path: Path
    token: str
    locks: bool

    @property
    def token_file(self) -> Path:
        """Written by the machine that made this."""
        return self.path / f".shared-{self.token}"

    def answer_file(self, answer: str) -> Path:
        """Written by another machine, under a name that it was given."""
        return self.path / f".shared-{self.token}.{answer}"


@contextmanager
def shared_folder(path: Path, *, locks: bool) -> Iterator[SharedFolder]:
    """Keep a token in a folder, so that other machines can tell whether they see the same one.

    Args:
        path: The folder, absolute; it must exist.
        locks: Whether others must respect locks in it, too.

    Yields:
        What to hand to `check_folder_from`.

    Raises:
        ValueError: Locks on a system that has none.
        OSError: The folder cannot be written.
    """
    folder = SharedFolder(path=path, token=secrets.token_hex(16), locks=locks)
    if locks and fcntl is None:
        raise ValueError(f"{path} cannot be locked on this system; keep the ledger on Linux or macOS, or leave it out")
    try:
        with folder.token_file.open("w+") as file:
            file.write(folder.token)
            file.flush()
            if locks:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield folder
    finally:
        for left in (folder.token_file, *path.glob(f".shared-{folder.token}.*")):
            left.unlink(missing_ok=True)


def check_folder_from(folder: SharedFolder, answer: str) -> str:
    """Look at a folder from another machine, and leave an answer there.

    Args:
        folder: Handed over by the machine that made it.
        answer: Name of the answer; letters and digits.

    Returns:
        What is wrong, or nothing.

    Guarantee:
        Nothing is wrong only if the token was read here, the answer was written here and, with `locks`, the lock that the
        other machine holds kept this one out. That the answer arrives is for the other machine to check: `has_answer`.
    """
    try:
        if folder.token_file.read_text(encoding="utf-8") != folder.token:
            return "its files there are others"
        if folder.locks:
            with folder.token_file.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass
                else:
                    return "locks taken elsewhere do not hold there, so charges could be lost"
        folder.answer_file(answer).write_text(folder.token, encoding="utf-8")
    except (OSError, AttributeError) as error:  # AttributeError: no locks on that system
        return f"{getattr(error, 'strerror', None) or error}"
    return ""


def has_answer(folder: SharedFolder, answer: str) -> bool:
    """Whether the answer that a machine wrote shows on this one."""
    try:
        return folder.answer_file(answer).read_text(encoding="utf-8") == folder.token
    except OSError:
        return False
