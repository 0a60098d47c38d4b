"""A run under way: its checkpoints, client states and log of releases beside the run folder, until that is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.journal import Journal
from asfl_privacy.accounting.storage import read_document, write_document
from asfl_privacy.cells import Cell
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import Dataset, data_digest
from asfl_privacy.execution import Progress, RunStoppedError, begin_run
from asfl_privacy.execution.checkpoint import CLIENTS_FOLDER, read_checkpoint, write_checkpoint
from asfl_privacy.execution.release_log import LOG_FILE, LogPosition, ReleaseLog, count_logged
from asfl_privacy.federated import Federation, State
from asfl_privacy.federated.client_states import DiskClientStates
from asfl_privacy.folder_lock import FolderInUseError, locked
from asfl_privacy.reporting import write_atomic
from asfl_privacy.run_files import CONFIG_FILE, UNFINISHED, config_toml, run_config

START, START_FILE = "asfl-privacy run", "start.json"
OFTEN, SELDOM = 1, 10
"""Rounds between checkpoints where fresh noise makes every lost round cost ε, and otherwise."""

WITHOUT_EFFECT = (
    "executor", "checkpoint_every", "tolerate_failures", "launcher", "track", "device", "compile", "data_root",
)  # fmt: skip
"""Fields that do not belong to what a run computes, so that it may be resumed with others."""


class UnfinishedRunError(FolderInUseError):
    """The folder holds a run that was begun, not finished, and is not to be resumed."""


class Unfinished(Protocol):
    """Where a run is kept while it is under way.

    Attributes:
        notes: What a reader must be told of how it was found.
    """

    notes: tuple[str, ...]

    def begin(self, federation: Federation, *, ledger: Ledger | None, journal: Journal | None, run_id: str) -> Progress:
        """The run before its next round."""
        ...

    def after_round(self, progress: Progress) -> None:
        """Keep the run after a round, where one is due."""
        ...

    def keep(self) -> None:
        """Keep the run as it stands after its last round."""
        ...

    def finish(self) -> None:
        """Forget what was kept: the run folder is written."""
        ...


class NotKept:
    """A run that writes nothing before its end."""

    notes: tuple[str, ...] = ()

    def begin(self, federation: Federation, *, ledger: Ledger | None, journal: Journal | None, run_id: str) -> Progress:
        """See `Unfinished`."""
        return begin_run(federation, ledger=ledger, journal=journal, run_id=run_id)

    def after_round(self, progress: Progress) -> None:
        """See `Unfinished`."""

    def keep(self) -> None:
        """See `Unfinished`."""

    def finish(self) -> None:
        """See `Unfinished`."""


class KeptInFolder:
    """A run whose folder of checkpoints lets it go on after whatever ended its process.

    Args:
        folder: An existing folder of this run alone.
        fingerprint: Names what the run computes.
        every: Rounds between checkpoints.
        data_digest: Of the training records.
        fresh_noise: Whether noise comes from the system's source.

    Guarantee:
        A run that goes on ends with the bits that it would have ended with. Its ledger never counts less than what was
        released: what was sent after the last checkpoint is in the log, and is counted beside what is sent again with
        fresh noise; noise from the seed leaves again with the same bits and is counted once.
    """

    def __init__(self, folder: Path, *, fingerprint: str, every: int, data_digest: str, fresh_noise: bool) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._every = every
        self._data_digest = data_digest
        self._fresh_noise = fresh_noise
        self._log: ReleaseLog | None = None
        self._latest: Progress | None = None
        self.notes: tuple[str, ...] = ()
        self._kept = 0

    def begin(self, federation: Federation, *, ledger: Ledger | None, journal: Journal | None, run_id: str) -> Progress:
        """See `Unfinished`."""
        if ledger is not None:
            self._log = ReleaseLog.open(
                self._folder / LOG_FILE,
                p=ledger.p,
                radius=ledger.radius,
                data_digest=self._data_digest,
                num_records=federation.data.num_records,
            )
        found = read_checkpoint(self._folder, fingerprint=self._fingerprint, device=federation.device)
        if found is None:
            state = State(weights=federation.initial_weights, clients=DiskClientStates(self._folder / CLIENTS_FOLDER))
            progress = begin_run(federation, ledger=ledger, journal=journal, run_id=run_id, state=state)
            position = LogPosition()
        else:
            progress, position, self.notes = found.progress, found.log, found.notes
        account = progress.account
        if account is not None and self._log is not None:
            sent = self._log.replay_after(position, rounds_done=progress.rounds_done)
            count_logged(sent, ledger=account.ledger, budget=account.budget)
            progress = replace(progress, account=replace(account, journal=journal, log=self._log))
        self._latest, self._kept = progress, progress.rounds_done
        return progress

    def after_round(self, progress: Progress) -> None:
        """See `Unfinished`."""
        if self._log is not None and progress.account is not None:
            missing = self._log.unrepeated(rounds_done=progress.rounds_done)
            count_logged(missing, ledger=progress.account.ledger, budget=progress.account.budget)
        self._latest = progress
        if progress.rounds_done % self._every == 0:
            self.keep()

    def keep(self) -> None:
        """Write a checkpoint of the last round, where there is none yet.

        Raises:
            OSError: It cannot be written; the one before is whole.
        """
        if self._latest is None or self._latest.rounds_done == self._kept:
            return
        position = None if self._log is None else self._log.position
        write_checkpoint(self._folder, self._latest, fingerprint=self._fingerprint, log=position)
        self._kept = self._latest.rounds_done

    @property
    def holds_nothing(self) -> bool:
        """Whether there is neither a checkpoint nor a release whose noise will not come again."""
        released = self._log is not None and self._log.position != LogPosition() and self._fresh_noise
        return self._kept == 0 and not released

    def finish(self) -> None:
        """See `Unfinished`."""
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def keep_unfinished(
    config: SweepConfig,
    cell: Cell,
    *,
    folder: Path | None,
    data: Dataset,
    batched: bool,
    fresh_noise: bool,
    journal: Path | None,
    resume: bool,
) -> Iterator[Unfinished]:
    """Keep a run while it is under way; where it is asked to stop between two rounds, it is kept as it stands.

    Args:
        config: The configuration.
        cell: The run's cell, nothing left to decide.
        folder: The run folder that will be written; None keeps nothing.
        data: The data set.
        batched: Whether steps are batched, so that sums have other last digits than elsewhere.
        fresh_noise: Whether noise comes from the system's source, so that a round executed again costs ε again.
        journal: The data set's ledger over all runs, or None.
        resume: Whether to go on from what is kept, where there is anything.

    Raises:
        UnfinishedRunError: The folder holds a run that is not to be resumed.
        FolderInUseError: Another process writes there.
        OSError: The folder cannot be made.
    """
    every = (OFTEN if fresh_noise else SELDOM) if config.checkpoint_every is None else config.checkpoint_every
    if folder is None or every == 0:
        yield NotKept()
        return
    place = unfinished_folder(folder)
    began = _holds_something(place)
    if began and not resume:
        raise UnfinishedRunError(
            f"{place} holds a run that was begun and not finished; add --resume to go on with it, or delete the folder"
        )
    place.mkdir(parents=True, exist_ok=True)
    digest = data_digest(data)
    asked = {
        "config": run_config(config, cell).model_dump(mode="json", exclude=set(WITHOUT_EFFECT)),
        "records": digest,
        "sums": "batched" if batched else "one by one",
        "ledger": None if journal is None else str(journal.resolve()),
    }
    kept = KeptInFolder(
        place,
        fingerprint=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
        every=every,
        data_digest=digest,
        fresh_noise=fresh_noise,
    )
    with locked(place, refusal=f"{place} is being written by another process; wait for it, or give another --out"):
        _check_start(place, asked)
        if not (place / CONFIG_FILE).is_file():
            write_atomic(place / CONFIG_FILE, config_toml(run_config(config, cell)))
        try:
            yield kept
        except RunStoppedError:
            kept.keep()
            raise
        except BaseException:
            if not began and kept.holds_nothing:  # nothing to go on from, and nothing that was sent for good
                kept.finish()
            raise


def unfinished_folder(folder: Path) -> Path:
    """Where a run is kept before its folder is written: beside it, or inside where that exists already (a mount, say).

    Where something is kept in one of both places, it is that one, whatever has become of the folder since.

    Raises:
        UnfinishedRunError: Something is kept in both.
    """
    beside, inside = folder.with_name(folder.name + UNFINISHED), folder / UNFINISHED
    holding = [place for place in (beside, inside) if _holds_something(place)]
    if len(holding) > 1:
        raise UnfinishedRunError(f"{beside} and {inside} both hold an unfinished run; move one of them away")
    if holding:
        return holding[0]
    return inside if folder.is_dir() else beside


def is_resumable(folder: Path) -> bool:
    """Whether something is kept of a run that has not finished."""
    return _holds_something(unfinished_folder(folder))


def forget_finished(folder: Path) -> None:
    """Remove what is still kept of a run whose folder is whole, where its process was ended in between."""
    with suppress(UnfinishedRunError):
        shutil.rmtree(unfinished_folder(folder), ignore_errors=True)


def _holds_something(place: Path) -> bool:
    if place.exists() and not place.is_dir():
        raise UnfinishedRunError(f"{place} is no folder, and a run under way is kept there; move it away")
    return place.is_dir() and any(path.name != ".lock" for path in place.iterdir())


def _check_start(place: Path, asked: Mapping[str, Any]) -> None:
    """Note what a run was begun with, before anything is sent, or refuse to go on with something else.

    Raises:
        UnfinishedRunError: Another configuration, other records, another order of sums, or another data set's ledger.
    """
    file = place / START_FILE
    if not file.is_file():
        write_document(file, name=START, version=1, body={"asked": asked})
        return
    try:
        begun = read_document(file, name=START, version=1)["asked"]
    except (ValueError, KeyError) as error:
        raise UnfinishedRunError(
            f"{file} is damaged ({error}); restore a copy, or start anew in another folder"
        ) from None
    for name, value in {**asked["config"], **{key: asked[key] for key in ("records", "sums", "ledger")}}.items():
        before = begun["config"].get(name) if name in asked["config"] else begun.get(name)
        if before != value:
            raise UnfinishedRunError(
                f"{place} holds a run of another configuration: it was begun with {name} {before}, and {name} {value} is "
                "asked; resume it as it was begun, or give another --out"
            )
