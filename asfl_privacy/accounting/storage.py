"""Documents on disk: JSON with a format name, a version and a checksum, written atomically and read strictly.

{"format": NAME, "version": N, "sha256": HEX, "body": {…}}; sha256 is of the body as compact JSON with sorted keys.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_document(path: Path, *, name: str, version: int, body: dict[str, Any]) -> None:
    """Write ``body`` so that the file is either the old one or the whole new one.

    Args:
        path: file to write; its folder must exist.
        name: the format's name.
        version: the format's version.
        body: plain JSON values without NaN or inf.

    Raises:
        OSError: if the folder cannot be written.
        ValueError: if the body holds NaN or inf.
    """
    envelope = {"format": name, "version": version, "sha256": _checksum(body), "body": body}
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(envelope, stream, allow_nan=False, separators=(",", ":"))
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        mask = os.umask(0)  # the permissions of an ordinary new file, which mkstemp does not give
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_document(path: Path, *, name: str, version: int) -> dict[str, Any]:
    """Read the body of a document.

    Args:
        path: file to read.
        name: the format's name, which must match.
        version: the format's version, which must match.

    Returns:
        The body.

    Raises:
        ValueError: if the file is no such document, is truncated or corrupted, or has another version.
        OSError: if the file cannot be read.
    """
    return read_versions(path, name=name, versions=(version,))[1]


def read_versions(path: Path, *, name: str, versions: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """Read the body of a document of any of several versions.

    Args:
        path: file to read.
        name: the format's name, which must match.
        versions: the versions that the caller can read.

    Returns:
        The version found, and the body.

    Raises:
        ValueError: see ``read_document``.
        OSError: if the file cannot be read.
    """
    fix = f"restore a {name} file written by save()"
    try:
        envelope = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is corrupted or truncated ({reason}): it must be one JSON document; {fix}") from None
    if not isinstance(envelope, dict) or envelope.get("format") != name:
        raise ValueError(f'{path} is no {name}: its "format" must be {name!r}; {fix}')
    found = envelope.get("version")
    if isinstance(found, bool) or not isinstance(found, int) or found not in versions:
        known = " or ".join(str(version) for version in versions)
        raise ValueError(f"{path} has version {found!r}: this program reads version {known}; {fix} of this version")
    body = envelope.get("body")
    if set(envelope) != {"format", "version", "sha256", "body"} or not isinstance(body, dict):
        raise ValueError(f"{path} has keys {sorted(envelope)}: format, version, sha256 and body are due; {fix}")
    if envelope["sha256"] != _checksum(body):
        raise ValueError(f"{path} is corrupted: its body does not match its sha256; {fix}")
    return found, body


def sync_path(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number JSON knows")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found
