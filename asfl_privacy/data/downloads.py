"""Reading torchvision's data sets: in silence, and without a trace where that fails."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

_Read = TypeVar("_Read")


class NothingReadError(Exception):
    """Files are missing or unreadable, and a download failed; the text is the reason, one line."""


def read_or_download(read: Callable[[], _Read], *, folder: Path, archive: Path | None = None) -> _Read:
    """Call what reads a data set or downloads it.

    Args:
        read: Called without arguments; what it prints is dropped.
        folder: In which it looks for files, and which a download makes, with its parents.
        archive: The file that a download writes first, or None.

    Returns:
        What `read` returns.

    Raises:
        NothingReadError: `read` failed as torchvision does where files are missing or corrupt, or the network is.

    Guarantee:
        After a failure there are no empty folders and no part of an archive that were not there before.

    Example:
        >>> read_or_download(lambda: 3, folder=Path("data"))
        3
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    is_new = archive is not None and not archive.exists()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return read()
    except (RuntimeError, OSError, ValueError, HTTPException) as error:
        if archive is not None and is_new:
            archive.unlink(missing_ok=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise NothingReadError((str(error).splitlines() or [type(error).__name__])[0]) from error
