"""A file is either the old one or the whole new one."""

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file in one step: written beside it, flushed to disk, then renamed over it.

    Args:
        path: The file to write. Its folder must exist.
        content: Bytes, or text that is encoded as UTF-8 with its line ends untouched.

    Raises:
        OSError: The folder is missing or not writable; the old file is untouched and no temporary file stays.

    Guarantee:
        A reader, or a run killed at any moment, sees the old content or all of the new one, never a part.

    Edge cases:
        Empty content writes an empty file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomic(folder / "note.txt", "one line")
        >>> [entry.name for entry in folder.iterdir()]
        ['note.txt']
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
