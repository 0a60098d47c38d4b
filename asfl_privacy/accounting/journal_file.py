"""The file of a journal: its lines, its lock, and what a crash may leave behind.

Line by line: 64 hex digits, a space, compact JSON, a newline. The digits are the sha256 of those of the line before (none
before the first) and of this line's JSON, so a line that was changed, dropped or moved is found. The first line holds the
facts; every other line one append: {"run": ID, "classes": […]}, the classes as in a ledger file of version 2.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asfl_privacy.accounting.checks import check_choice, check_integer, check_norm, check_radius, norm_word
from asfl_privacy.accounting.ledger import PRIVACY_UNIT
from asfl_privacy.accounting.storage import sync_path

try:
    import fcntl
except ImportError:  # a system without advisory locks
    fcntl = None  # type: ignore[assignment]  # stands for "no locks here": every use is refused

FORMAT, VERSION, NOTE = "asfl-privacy journal", 1, "private: do not share"
READ, APPEND = os.O_RDONLY, os.O_RDWR | os.O_APPEND
CREATE = APPEND | os.O_CREAT
START = b'{"format": "' + FORMAT.encode("ascii")


@dataclass(frozen=True, kw_only=True)
class JournalFacts:
    """What a journal is about; all runs in it share this.

    Args:
        p: norm of the neighbouring relation, see ``Ledger``.
        radius: see ``Ledger``.
        data_digest: sha256 of the training records, 64 hex digits.
        num_records: n ≥ 1; record ids are 0…n − 1.
        privacy_unit: what one neighbour differs in, see ``Ledger``.
    """

    p: float
    radius: float | str
    data_digest: str
    num_records: int
    privacy_unit: str = PRIVACY_UNIT

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", check_norm(self.p))
        object.__setattr__(self, "radius", check_radius(self.radius))
        check_choice("privacy_unit", self.privacy_unit, (PRIVACY_UNIT,))
        digest = self.data_digest
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(
                f"data_digest is {digest!r}: it must be the sha256 of the training records; pass its 64 hex digits"
            )
        object.__setattr__(self, "num_records", check_integer("num_records", self.num_records, minimum=1))


@dataclass(frozen=True, kw_only=True)
class Append:
    """One line: the run, and the ledger classes of what it released."""

    line: int
    run: str
    classes: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is known of the file: its whole lines up to ``size`` bytes."""

    identity: tuple[int, int]
    size: int
    digest: str
    facts: JournalFacts
    appends: tuple[Append, ...] = ()


def extend(
    descriptor: int, snapshot: Snapshot, *, torn: bool, run_id: str, classes: Sequence[dict[str, Any]]
) -> Snapshot:
    """Bring one more append to disk, and say what is known of the file then.

    Raises:
        OSError: if it cannot be brought to disk; the file then ends where it did.
    """
    payload = json.dumps({"run": run_id, "classes": classes}, separators=(",", ":"), allow_nan=False)
    line = _line(snapshot.digest, payload)
    _write_line(descriptor, line, size=snapshot.size, cut=torn)
    append = Append(line=len(snapshot.appends) + 2, run=run_id, classes=tuple(classes))
    size, digest = snapshot.size + len(line), line[:64].decode("ascii")
    return replace(snapshot, size=size, digest=digest, appends=(*snapshot.appends, append))


def _line(digest_before: str, payload: str | bytes) -> bytes:
    content = payload.encode("ascii") if isinstance(payload, str) else payload
    digest = hashlib.sha256(digest_before.encode("ascii") + content).hexdigest()
    return digest.encode("ascii") + b" " + content + b"\n"


def _write_line(descriptor: int, line: bytes, *, size: int, cut: bool) -> None:
    """Append ``line`` after the first ``size`` bytes and wait until it is on disk; else leave those bytes alone."""
    try:
        if cut:
            os.ftruncate(descriptor, size)
        left = memoryview(line)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):  # then a line may stay that was not answered for: charged, not sent
            os.ftruncate(descriptor, size)
        raise


def open_facts(descriptor: int, path: Path, facts: JournalFacts) -> Snapshot:
    """Write the first line if the file is new, and read it all; ``descriptor`` is locked for writing.

    Raises:
        ValueError: if the file is no journal, is damaged, or was made for other facts; it is then untouched.
        OSError: if the first line cannot be brought to disk; the new file is then removed.
    """
    words = asdict(facts) | {"p": norm_word(facts.p)}
    header = _line("", json.dumps({"format": FORMAT, "version": VERSION, "note": NOTE} | words))
    found = os.pread(descriptor, len(header) + 1, 0)
    if found and found != header and header.startswith(found):
        raise ValueError(
            f"{path} ends inside its first line: what it held is not known; restore a copy, or remove it if no run used it"
        )
    if not found:
        try:
            _write_line(descriptor, header, size=0, cut=False)
            sync_path(path.parent)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    snapshot, _ = scan(descriptor, path, None)
    for name, mine in asdict(facts).items():
        theirs = getattr(snapshot.facts, name)
        if theirs != mine:
            raise ValueError(
                f"{path} was made for {name} {theirs!r}, not {mine!r}: a journal adds up runs on one data set under one "
                f"neighbouring relation; use {name} {theirs!r} or another file"
            )
    return snapshot


@contextlib.contextmanager
def locked(path: Path, flags: int) -> Iterator[int]:
    """Yield the file, opened anew and locked against every other process and thread: for itself alone if it may write.

    A descriptor of its own for every use: a forked child that inherited one would share its lock.

    Raises:
        ValueError: if it is no regular file, or this system has no advisory locks.
        OSError: if it cannot be opened, read or written, in one line.
    """
    if fcntl is None:
        raise ValueError(
            f"{path} cannot be locked: this system has no flock, so runs at the same time could lose charges; keep the "
            "journal on Linux or macOS, or run without a journal"
        )
    writes = bool(flags & os.O_RDWR)
    try:
        descriptor = _open_locked(path, flags, fcntl.LOCK_EX if writes else fcntl.LOCK_SH)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno is None:
            raise
        doing, fix = (
            ("written", "make room, or check the folder and its permissions") if writes else ("read", "check it")
        )
        raise OSError(
            f"{path} cannot be {doing} ({error.strerror}): nothing may be sent that is not safely in the journal; {fix}, "
            "and start again"
        ) from error


def scan(descriptor: int, path: Path, known: Snapshot | None) -> tuple[Snapshot, bool]:
    """Read what was appended since ``known`` (everything for None), and check it.

    Args:
        descriptor: the locked file.
        path: what to call it.
        known: an earlier snapshot of the same file.

    Returns:
        What is known now, and whether a line follows that was cut short.

    Raises:
        ValueError: if it is no journal, a line is damaged, or the file is not the one of ``known``.
    """
    state = os.fstat(descriptor)
    identity = (state.st_dev, state.st_ino)
    if known is not None and (identity != known.identity or state.st_size < known.size):
        raise ValueError(
            f"{path} was replaced or shortened while it was in use: charges may be missing; restore the file with all "
            "its lines and open it again"
        )
    start, digest = (0, "") if known is None else (known.size, known.digest)
    *lines, rest = _read(descriptor, start, state.st_size).split(b"\n")
    torn = bool(rest)
    if known is None:
        if not lines:
            raise ValueError(_no_journal(path))
        digest, known = _first(lines.pop(0), path, identity)
    appends, size = list(known.appends), known.size
    for index, line in enumerate(lines):
        number = len(appends) + 2
        content = line[65:]
        expected = _line(digest, content)
        if line + b"\n" != expected:
            if (
                index == len(lines) - 1 and not rest and b"\0" in line
            ):  # its length reached the disk, its blocks did not
                torn = True
                break
            raise ValueError(
                f"{path} line {number} is damaged: it does not match its checksum, so charges may be missing; restore "
                "a copy of the file that has it"
            )
        digest = expected[:64].decode("ascii")
        size += len(expected)
        appends.append(_parse(content, path, number))
    return replace(known, size=size, digest=digest, appends=tuple(appends)), torn


def _open_locked(path: Path, flags: int, kind: int) -> int:
    while True:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link: a journal must be the file itself; pass the path it points to"
            )
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file: a journal must be one; pass the path of a file")
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            state = os.fstat(descriptor)
            try:
                now = path.stat()
            except FileNotFoundError:
                now = None
            if not stat.S_ISREG(state.st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            if now is not None and (now.st_dev, now.st_ino) == (state.st_dev, state.st_ino):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed or replaced while this waited for the lock: take what is there now


def _first(line: bytes, path: Path, identity: tuple[int, int]) -> tuple[str, Snapshot]:
    content = line[65:]
    if not content.startswith(START):
        raise ValueError(_no_journal(path))
    expected = _line("", content)
    if line + b"\n" != expected:
        raise ValueError(f"{path} line 1 is damaged: it does not match its checksum; restore a copy of the file")
    words = json.loads(content)
    if words.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {words.get('version')!r}: this program knows version {VERSION}; use the program that "
            "wrote it, or another file"
        )
    try:
        facts = JournalFacts(**{name: words[name] for name in JournalFacts.__dataclass_fields__})
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} line 1 holds no valid facts ({error}); restore a copy of the file") from None
    digest = expected[:64].decode("ascii")
    return digest, Snapshot(identity=identity, size=len(expected), digest=digest, facts=facts)


def _parse(content: bytes, path: Path, number: int) -> Append:
    try:
        words = json.loads(content)
        run, classes = words["run"], words["classes"]
        if set(words) != {"run", "classes"} or not isinstance(run, str) or not isinstance(classes, list):
            raise ValueError("run and classes are due")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} line {number} is no append of this version ({error}); restore a copy") from None
    return Append(line=number, run=run, classes=tuple(classes))


def _no_journal(path: Path) -> str:
    return f"{path} is no {FORMAT}: its first line must name this format; pass a journal, or a new file to make one"


def _read(descriptor: int, start: int, end: int) -> bytes:
    parts = []
    while start < end and (part := os.pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)
