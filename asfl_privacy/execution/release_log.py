"""The log of releases: what a run's attempts have sent, on the disk before it is sent, so that no crash forgets it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.columns import make_column
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.journal import Release
from asfl_privacy.accounting.journal_file import (
    APPEND,
    CREATE,
    READ,
    Append,
    JournalFacts,
    Snapshot,
    extend,
    locked,
    open_facts,
    scan,
)
from asfl_privacy.accounting.ledger_file import decode_classes, encode_class
from asfl_privacy.accounting.storage import sync_path

LOG_FILE = "releases.journal"
_CLASSES_VERSION = 2  # what encode_class writes


@dataclass(frozen=True)
class LogPosition:
    """How far a log went when a checkpoint was made.

    Attributes:
        appends: Number of appends.
        digest: Digest of the last of them, which depends on all before it; empty before the first.
    """

    appends: int = 0
    digest: str = ""


class ReleaseLog:
    """The append-only file of one run's releases, over all its attempts; made by `open`.

    The file is a journal (accounting/journal_file.py) whose runs are the attempts, so whatever reads journals reads it.

    Guarantee:
        A release stands in the log, on the disk, before `append` returns: whoever sends only afterwards has sent nothing
        that the log does not hold, wherever it is killed. A checkpoint's ledger in which `replay_after` is counted holds
        every append with noise from the system's source, of all attempts, exactly once: all that was sent, and what a
        kill kept from being sent. Noise from the seed leaves again with the same bits when its round is executed again:
        it is not counted again then, and `unrepeated` names what did not leave again, so that it is not forgotten.

    Edge cases:
        A last line that was cut short was never answered for: the next append removes it. A log that lacks a line which a
        checkpoint knew is refused. One process at a time may own the run's folder.

    Example:
        >>> import tempfile
        >>> release = {"channel": "activations", "mechanism": "gaussian", "noise_multiplier": 2.0, "records": [3, 7]}
        >>> facts = {"p": 2.0, "radius": 1.0, "data_digest": "0" * 64, "num_records": 9}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = ReleaseLog.open(Path(folder) / LOG_FILE, **facts)
        ...     log.append([release | {"round": 0}])
        ...     checkpoint = log.position
        ...     log.append([release | {"round": 1}])
        ...     again = ReleaseLog.open(Path(folder) / LOG_FILE, **facts)
        ...     [(one["round"], one["records"].tolist()) for one in again.replay_after(checkpoint, rounds_done=1)]
        [(1, [3, 7])]
    """

    def __init__(self, path: Path, snapshot: Snapshot, *, attempt: str) -> None:
        self.path, self.attempt = path, attempt
        self._snapshot = snapshot
        self._pending: dict[int, dict[str, Append]] = {}  # of noise from the seed, by round: distinct, to leave again

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        p: float,
        radius: float | str,
        data_digest: str,
        num_records: int,
        attempt: str | None = None,
    ) -> ReleaseLog:
        """Open a run's log for appending; make it if there is no such file.

        Args:
            path: The file; its folder must exist.
            p: As the ledger's.
            radius: As the ledger's.
            data_digest: SHA-256 of the training records, 64 hex digits.
            num_records: Records of the data set.
            attempt: Names this attempt, 1 to 200 printable characters; None for a name of its own.

        Raises:
            ValueError: The file is no journal, is damaged, or was made for other facts; it is then untouched.
            OSError: The file cannot be made, read or written.
        """
        path, facts = Path(path), JournalFacts(p=p, radius=radius, data_digest=data_digest, num_records=num_records)
        attempt = f"attempt {secrets.token_hex(8)}" if attempt is None else attempt
        if not 0 < len(attempt) <= 200 or not attempt.isprintable():
            raise ValueError(f"attempt is {attempt!r}: it must be 1 to 200 printable characters; pass e.g. 'attempt 1'")
        if (
            not path.exists()
        ):  # a log that was killed inside its first line could not be opened again: rename a whole one
            fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                with locked(fresh, CREATE) as descriptor:
                    open_facts(descriptor, fresh, facts)
                fresh.rename(path)
            finally:
                fresh.unlink(missing_ok=True)
        with locked(path, CREATE) as descriptor:
            snapshot = open_facts(descriptor, path, facts)
            sync_path(path.parent)
        return cls(path, snapshot, attempt=attempt)

    @property
    def position(self) -> LogPosition:
        """How far the log goes, as this object knows it: what a checkpoint of this moment must hold."""
        count = len(self._snapshot.appends)
        return LogPosition(appends=count, digest=self._snapshot.digest if count else "")

    def append(self, releases: Sequence[Release]) -> None:
        """Write releases, all or none; on the disk when this returns.

        Args:
            releases: As `Ledger.record` takes them, at least one; those that share all but the records are put together.

        Raises:
            ValueError: A value is out of range, or the file is damaged or was replaced; nothing may be sent.
            OSError: The line cannot be brought to the disk; nothing may be sent.
        """
        classes = self._classes(releases)
        with locked(self.path, APPEND) as descriptor:
            snapshot, torn = scan(descriptor, self.path, self._snapshot)
            self._snapshot = extend(descriptor, snapshot, torn=torn, run_id=self.attempt, classes=classes)
        for entry in classes:
            self._pending.get(entry["round"], {}).pop(_text(entry), None)

    def replay_after(self, position: LogPosition, *, rounds_done: int) -> list[Release]:
        """What a checkpoint's ledger lacks, of all attempts, in order; call it once, before the first append.

        Args:
            position: The checkpoint's; `LogPosition()` for none.
            rounds_done: The checkpoint's; 0 for none.

        Returns:
            Releases with fresh noise, as `Ledger.record` takes them: their rounds are executed again with other noise,
            which is charged anew. Records have shape (n,), one named as often as it was released.

        Raises:
            ValueError: The log lacks what the checkpoint knew, is damaged or was replaced.
            OSError: It cannot be read.
        """
        with locked(self.path, READ) as descriptor:
            self._snapshot, _ = scan(descriptor, self.path, self._snapshot)
        appends = self._snapshot.appends
        if position.appends > len(appends) or self._digest(position.appends) != position.digest:
            raise ValueError(
                f"{self.path} does not hold the {position.appends} appends that the checkpoint knew: releases may be missing, "
                "so the ledger could count too little; restore the log, with all its lines"
            )
        fresh: list[Release] = []
        self._pending = {}
        for number, one in enumerate(appends):
            for entry in one.classes:
                alone = replace(one, classes=(entry,))
                if entry["sampler"] != "seeded":
                    fresh += self._decoded(alone) if number >= position.appends else []
                elif entry["round"] >= rounds_done:
                    self._pending.setdefault(entry["round"], {})[_text(entry)] = alone
        return fresh

    def unrepeated(self, *, rounds_done: int) -> list[Release]:
        """What rounds released with noise from the seed before the run was stopped, and not when executed again.

        Where a client failed in one attempt and not in the other, other records leave. To be asked and counted after
        every round; each release is named once.

        Args:
            rounds_done: Rounds that have been executed.
        """
        over = [number for number in sorted(self._pending) if number < rounds_done]
        return [
            release for number in over for one in self._pending.pop(number).values() for release in self._decoded(one)
        ]

    def _digest(self, appends: int) -> str:
        """The digest of an append, from the file, whose chain `scan` has checked."""
        if not appends:
            return ""
        with self.path.open("rb") as stream:
            for _ in range(appends):
                stream.readline()
            return stream.read(64).decode("ascii", errors="replace")

    def _classes(self, releases: Sequence[Release]) -> list[dict[str, Any]]:
        if not releases:
            raise ValueError("releases is empty: an append holds at least one release; pass one or do not append")
        facts = self._snapshot.facts
        shared: dict[tuple[Any, ...], list[NDArray[np.int64]]] = {}
        for release in releases:  # a charge of each client makes many releases of few classes
            key = tuple((name, value) for name, value in release.items() if name != "records")
            shared.setdefault(key, []).append(np.asarray(release["records"]))
        scratch = Ledger(p=facts.p, radius=facts.radius)
        for key, parts in shared.items():
            words: dict[str, Any] = dict(key)
            scratch.record(**words, records=np.concatenate(parts) if len(parts) > 1 else parts[0])
        classes = []
        for event in scratch.event_classes:
            column = make_column(*scratch.releases_of(event))
            if column.stop > facts.num_records:
                raise ValueError(
                    f"records holds {column.stop - 1}: the data set's ids are 0…{facts.num_records - 1}; check the ids"
                )
            classes.append(encode_class(event, column))
        return classes

    def _decoded(self, one: Append) -> list[Release]:
        facts = self._snapshot.facts
        try:
            found = list(decode_classes(list(one.classes), version=_CLASSES_VERSION, radius=facts.radius))
            if max((column.stop for _, column in found), default=0) > facts.num_records:
                raise ValueError(f"a record is beyond num_records {facts.num_records}")
        except ValueError as error:
            raise ValueError(
                f"{self.path} line {one.line} holds no releases that this program knows ({error}): another version wrote it; "
                "restore a copy"
            ) from None
        return [
            Release(**asdict(event), records=np.repeat(column.all_ids(), column.all_counts()))  # type: ignore[typeddict-item]
            for event, column in found
        ]


def count_logged(releases: Iterable[Release], *, ledger: Ledger, budget: RecordFilter | None) -> None:
    """Count what was sent already, in place.

    Args:
        releases: From `ReleaseLog.replay_after` or `ReleaseLog.unrepeated`.
        ledger: Of the checkpoint that the run goes on from.
        budget: Likewise, or None; a record that went over its budget is exhausted from now on.
    """
    for release in releases:
        words: dict[str, Any] = dict(release)
        ledger.record(**words)
        if budget is not None:
            names = ("records", "mechanism", "noise_multiplier", "epsilon_excess", "tail_probability")
            budget.count_past(**{name: words[name] for name in names})


def _text(entry: dict[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True)
