"""The journal of a data set: one append-only file that adds up everything released of it, by whichever run."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asfl_privacy.accounting.bracket import EpsilonBracket
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.columns import Ints, make_column
from asfl_privacy.accounting.event import EventClass, check_vector
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.journal_file import (
    APPEND,
    CREATE,
    READ,
    START,
    Append,
    JournalFacts,
    Snapshot,
    extend,
    locked,
    open_facts,
    scan,
)
from asfl_privacy.accounting.ledger import Ledger, LedgerCounts
from asfl_privacy.accounting.ledger_file import decode_classes, encode_class

_CLASSES_VERSION = 2  # what encode_class writes; another needs a new version of the journal


class Release(TypedDict, total=False):
    """One release of each record named: the arguments of ``Ledger.record``."""

    channel: Required[str]
    mechanism: Required[str]
    noise_multiplier: Required[float]
    round: Required[int]
    records: Required[ArrayLike]
    whole_record_multiplier: float | None
    num_classes: int | None
    sampler: str
    epsilon_excess: float
    tail_probability: float
    client_multiplier: float | None


def is_journal(path: str | Path) -> bool:
    """Whether a file begins like a journal; False too where there is none or it cannot be read."""
    path = Path(path)
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(65 + len(START))[65:] == START
    except OSError:
        return False


class Journal:
    """The releases of one data set, of all runs; made by ``open`` or ``read``.

    Guarantee:
        An append is on disk before it returns, so a caller that sends only afterwards never sends what is not charged; a
        crash in between leaves a charge without a release. Appends of several processes and threads on one machine
        exclude each other and lose nothing. A last line that was cut short (no newline, or blocks never written) was
        never answered for: it is ignored, and the next append removes it; any other damage is refused.

    Edge cases:
        Whole lines cut off at the end cannot be told from lines never written: keep the file where nothing else writes.
        Network file systems whose locks do not reach other machines are not supported.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     journal = Journal.open(Path(folder) / "data.journal", p=2, radius=0.1, data_digest="0" * 64, num_records=9)
        ...     for run in ("first", "second"):
        ...         journal.append(
        ...             run, channel="activations", mechanism="gaussian", noise_multiplier=10.0, round=0, records=[3, 7]
        ...         )
        ...     (sorted(journal.runs), round(journal.spent(delta=1e-5).high, 3))
        (['first', 'second'], 0.497)
    """

    def __init__(self, path: Path, snapshot: Snapshot) -> None:
        self.path = path
        self.is_cut = False  # whether a last line was cut short when the file was read
        self._snapshot = snapshot
        self._filters: dict[RecordBudget, tuple[int, RecordFilter]] = {}

    @classmethod
    def open(cls, path: str | Path, *, p: float, radius: float | str, data_digest: str, num_records: int) -> "Journal":
        """Open the journal of a data set for appending; make it if there is no such file.

        Args:
            path: the file; its folder must exist. A new file is readable by its owner alone.
            p: see ``JournalFacts``, as the other arguments.
            radius: see ``JournalFacts``.
            data_digest: see ``JournalFacts``.
            num_records: see ``JournalFacts``.

        Raises:
            ValueError: if the file is no journal, is damaged, or was made for other facts; it is then untouched.
            OSError: if the file cannot be made, read or written.
        """
        path, facts = Path(path), JournalFacts(p=p, radius=radius, data_digest=data_digest, num_records=num_records)
        with locked(path, CREATE) as descriptor:
            snapshot = open_facts(descriptor, path, facts)
        return cls(path, snapshot)

    @classmethod
    def read(cls, path: str | Path) -> "Journal":
        """Open an existing journal, whatever its facts.

        Raises:
            ValueError: if the file is no journal or is damaged.
            OSError: if it cannot be read.
        """
        path = Path(path)
        with locked(path, READ) as descriptor:
            snapshot, is_cut = scan(descriptor, path, None)
        journal = cls(path, snapshot)
        journal.is_cut = is_cut
        return journal

    @property
    def facts(self) -> JournalFacts:
        """What the journal is about."""
        return self._snapshot.facts

    @property
    def runs(self) -> dict[str, LedgerCounts]:
        """The ids of the runs, in the order of their first append, and what each has released."""
        return {run: self.ledger([run]).counts for run in dict.fromkeys(one.run for one in self._refreshed().appends)}

    def append(self, run_id: str, **release: Unpack[Release]) -> None:
        """Charge one release; on disk when this returns.

        Args:
            run_id: which run releases; a re-run or a sweep cell may use its own id or one of before, all add up.
            **release: as for ``Ledger.record``.

        Raises:
            ValueError: if a value is out of range, or the file is damaged or was replaced; nothing is charged.
            OSError: if the line cannot be brought to disk; nothing may be sent then.
        """
        self.append_all(run_id, [release])

    def append_all(self, run_id: str, releases: Iterable[Release]) -> None:
        """Charge several releases with one write: all or none of them. See ``append``."""
        classes = self._classes(self._checked(run_id, releases))
        with locked(self.path, APPEND) as descriptor:
            snapshot, torn = scan(descriptor, self.path, self._snapshot)
            self._snapshot = extend(descriptor, snapshot, torn=torn, run_id=run_id, classes=classes)

    def append_within(self, run_id: str, releases: Iterable[Release], *, budget: RecordBudget) -> None:
        """Charge several releases if every record stays within ``budget``, the spending of all runs counted.

        Args:
            run_id: see ``append``.
            releases: see ``append_all``.
            budget: per record, for all runs; ``RecordBudget.of_total`` makes one of (ε, δ). All runs must use the same.

        Raises:
            ValueError: if a record would exceed the budget, and as ``append``; nothing is charged.
            OSError: as ``append``.

        Guarantee:
            Checked and charged under one lock. If every append is made with this budget, all that the data set's runs
            release of one record is within ``budget.total``, however the runs choose their multipliers.
        """
        self._append_guarded(run_id, releases, budget=budget, partial=False)

    def append_admitted(
        self, run_id: str, releases: Iterable[Release], *, budget: RecordBudget
    ) -> list[NDArray[np.bool_]]:
        """Charge those of the records that stay within ``budget``; send only these.

        Args:
            run_id: see ``append``.
            releases: see ``append_all``; an earlier one goes first where both do not fit. What depends on several records
                at once (a client's update) cannot be sent for some of them alone: use ``append_within``.
            budget: see ``append_within``.

        Returns:
            One mask per release, in the order of its records: what was charged.

        Raises:
            ValueError: as ``append``; nothing is charged.
            OSError: as ``append``.
        """
        return self._append_guarded(run_id, releases, budget=budget, partial=True)

    def filter(self, budget: RecordBudget) -> RecordFilter:
        """A filter with this budget that has counted everything in the journal so far."""
        return copy.deepcopy(self._filter_at(self._refreshed(), budget))

    def ledger(self, runs: Sequence[str] | None = None) -> Ledger:
        """Everything released so far, or that of the runs named, as one ledger.

        Args:
            runs: ids of runs; None for all.

        Raises:
            ValueError: if a run is unknown, or the file is damaged or was replaced.
            OSError: if it cannot be read.
        """
        appends = self._refreshed().appends
        known = {one.run for one in appends}
        for run in () if runs is None else runs:
            if run not in known:
                raise ValueError(f"run {run!r} is not in {self.path}: it knows {sorted(known)[:10]}; pass one of runs")
        ledger = self._empty()
        for one in appends:
            if runs is None or one.run in runs:
                for event, ids in self._decoded(one):
                    ledger.record(**asdict(event), records=ids)
        return ledger

    def spent(self, *, delta: float, distance: float = 1.0) -> EpsilonBracket:
        """ε of everything released so far, of all runs: see ``Ledger.epsilon``."""
        return self.ledger().epsilon(delta=delta, distance=distance)

    def _append_guarded(
        self, run_id: str, releases: Iterable[Release], *, budget: RecordBudget, partial: bool
    ) -> list[NDArray[np.bool_]]:
        checked = self._checked(run_id, releases)
        with locked(self.path, APPEND) as descriptor:
            snapshot, torn = scan(descriptor, self.path, self._snapshot)
            guard = copy.deepcopy(self._filter_at(snapshot, budget))
            masks, admitted = [], []
            for event, ids in checked:
                charge = _charge_of(event)
                mask = guard.admit(ids, **charge) if partial else np.ones(len(ids), dtype=np.bool_)
                if mask.any():
                    guard.charge(ids[mask], **charge)
                    admitted.append((event, ids[mask]))
                masks.append(mask)
            if admitted:
                snapshot = extend(descriptor, snapshot, torn=torn, run_id=run_id, classes=self._classes(admitted))
                self._filters[budget] = (len(snapshot.appends), guard)
            self._snapshot = snapshot
        return masks

    def _refreshed(self) -> Snapshot:
        with locked(self.path, READ) as descriptor:
            self._snapshot, _ = scan(descriptor, self.path, self._snapshot)
            return self._snapshot

    def _filter_at(self, snapshot: Snapshot, budget: RecordBudget) -> RecordFilter:
        counted, guard = self._filters.get(budget, (0, None))
        if guard is None or counted > len(snapshot.appends):
            counted, guard = 0, RecordFilter.within(budget, num_records=self.facts.num_records)
        guard = copy.deepcopy(guard)
        for one in snapshot.appends[counted:]:
            for event, ids in self._decoded(one):
                guard.count_past(ids, **_charge_of(event))
        self._filters[budget] = (len(snapshot.appends), guard)
        return guard

    def _checked(self, run_id: str, releases: Iterable[Release]) -> list[tuple[EventClass, Ints]]:
        if not isinstance(run_id, str) or not 0 < len(run_id) <= 200 or not run_id.isprintable():
            raise ValueError(
                f"run_id is {run_id!r}: it must be 1 to 200 printable characters; pass e.g. run_id='run-1'"
            )
        checked = []
        for release in releases:
            scratch = self._empty()
            scratch.record(**release)
            ids = check_vector("records", release["records"], minimum=0)
            if int(ids.max()) >= self.facts.num_records:
                raise ValueError(
                    f"records holds {int(ids.max())}: the data set's ids are 0…{self.facts.num_records - 1}; check the ids"
                )
            checked.append((scratch.event_classes[0], ids))
        if not checked:
            raise ValueError("releases is empty: an append holds at least one release; pass one or do not append")
        return checked

    def _classes(self, releases: Iterable[tuple[EventClass, Ints]]) -> list[dict[str, Any]]:
        scratch = self._empty()
        for event, ids in releases:
            scratch.record(**asdict(event), records=ids)
        return [encode_class(event, make_column(*scratch.releases_of(event))) for event in scratch.event_classes]

    def _decoded(self, one: Append) -> list[tuple[EventClass, Ints]]:
        """The releases of one line; a record stands as often as it was named."""
        try:
            found = list(decode_classes(list(one.classes), version=_CLASSES_VERSION, radius=self.facts.radius))
            last = max((column.stop for _, column in found), default=0)
            if last > self.facts.num_records:
                raise ValueError(f"record {last - 1} is beyond num_records {self.facts.num_records}")
        except ValueError as error:
            raise ValueError(
                f"{self.path} line {one.line} holds no releases that this program knows ({error}): another program or "
                "version wrote it; restore a copy"
            ) from None
        return [
            (event, np.repeat(column.all_ids(), column.all_counts()) if column.every != 1 else column.all_ids())
            for event, column in found
        ]

    def _empty(self) -> Ledger:
        return Ledger(p=self.facts.p, radius=self.facts.radius)


def _charge_of(event: EventClass) -> dict[str, Any]:
    """What a filter asks of an event."""
    return {
        "mechanism": event.mechanism,
        "noise_multiplier": event.noise_multiplier,
        "epsilon_excess": event.epsilon_excess,
        "tail_probability": event.tail_probability,
    }
