"""The ledger of a data set over all runs, opened for the runs at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asfl_privacy.accounting import Journal, Ledger
from asfl_privacy.data import Dataset, data_digest
from asfl_privacy.federated import Privacy


def open_journal(path: Path, *, data: Dataset, ledger: Ledger) -> Journal:
    """The data set's ledger over all runs, made if it is missing.

    Raises:
        ValueError: A file of another data set, norm or radius, or that cannot be read or written.
    """
    return Journal.open(
        path, p=ledger.p, radius=ledger.radius, data_digest=data_digest(data), num_records=data.num_records
    )


def check_journal(
    path: Path | None, promises: Sequence[Privacy | None], *, data: Dataset, evaluate_on: str = "test"
) -> None:
    """Refuse a data set's ledger that some run could not be added to, before time is spent; makes it if it is missing.

    Raises:
        ValueError: As `open_journal`, runs that differ in norm or radius, which one ledger cannot add up, or runs that hold
            out training records, which number the others anew.
    """
    if path is None:
        return
    if evaluate_on != "test":
        raise ValueError(
            f"ledger {path} with evaluate_on {evaluate_on}: the records that are left have other numbers than those of the whole "
            "data set, so that their releases could not be added up; tune without noise, or evaluate on test"
        )
    relations = {(privacy.p, privacy.radius) for privacy in promises if privacy is not None}
    if len(relations) != 1:
        raise ValueError(
            f"ledger {path}: the runs promise {len(relations)} pairs of norm and radius, and one ledger adds up one; give a "
            "single norm and radius with noise, or no --ledger"
        )
    ((p, radius),) = relations
    open_journal(path, data=data, ledger=Ledger(p=p, radius=radius))
