"""Charging: what leaves a client stands in the ledgers first, and records whose budget is spent are held back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.filter import RecordFilter
from asfl_privacy.accounting.journal import Journal, Release
from asfl_privacy.execution.release_log import ReleaseLog
from asfl_privacy.federated import Charge, Federation, Privacy
from asfl_privacy.federated.local_training import update_noise
from asfl_privacy.federated.phases import Remaining

LIMITLESS = 2**62


@dataclass(frozen=True)
class Account:
    """Everything that must know of a release before it is sent; changed in place by `charge`.

    Attributes:
        ledger: The run's own.
        budget: Individual filter, or None.
        journal: The data set's ledger over all runs, or None.
        run_id: Names this run in the journal.
        log: The run's own log of releases, over all its attempts, or None.
        held_back: Which records were not used because their budget was spent, shape (records,).
        kept: By channel, which records' one draw has been charged already, shape (records,).
    """

    ledger: Ledger
    held_back: NDArray[np.bool_]
    budget: RecordFilter | None = None
    journal: Journal | None = None
    run_id: str = "run"
    log: ReleaseLog | None = None
    kept: dict[str, NDArray[np.bool_]] = field(default_factory=dict)


def open_account(
    ledger: Ledger, *, privacy: Privacy, num_records: int, journal: Journal | None = None, run_id: str = "run"
) -> Account:
    """An account in which nothing is spent yet.

    Args:
        ledger: The run's ledger, empty.
        privacy: Budgets of the filter, if any.
        num_records: Records of the data set.
        journal: The data set's ledger, or None.
        run_id: Names this run there.
    """
    budget = None if privacy.budget is None else RecordFilter.within(privacy.budget, num_records=num_records)
    held_back = np.zeros(num_records, dtype=np.bool_)
    return Account(ledger=ledger, held_back=held_back, budget=budget, journal=journal, run_id=run_id)


def charge(account: Account, charges: Sequence[Charge], *, num_records: int, round: int) -> None:
    """Write releases into every ledger; only afterwards may they be sent.

    Args:
        account: What is charged, in place.
        charges: Of one exchange; all are charged together.
        num_records: Records of the data set.
        round: Round number.

    Raises:
        ValueError: A release past a budget, or a damaged journal: nothing is charged then.
        OSError: A journal that cannot be written: nothing may be sent then.

    Guarantee:
        Log and journal are on the disk when this returns. A process that dies before has sent nothing; one that dies after
        has charged what it may not have sent, never the reverse.
    """
    events: list[Release] = []
    firsts: list[tuple[str, NDArray[np.int64]]] = []
    for one in charges:
        records = one.records
        if one.once:
            kept = account.kept.setdefault(one.channel, np.zeros(num_records, dtype=np.bool_))
            records = records[~kept[records]]
            firsts.append((one.channel, records))
        if len(records):
            events.append(
                {
                    "channel": one.channel,
                    "mechanism": one.mechanism,
                    "noise_multiplier": one.noise_multiplier,
                    "whole_record_multiplier": one.whole_record_multiplier,
                    "num_classes": one.num_classes,
                    "sampler": one.sampler,
                    "epsilon_excess": one.epsilon_excess,
                    "tail_probability": one.tail_probability,
                    "client_multiplier": one.client_multiplier,
                    "round": round,
                    "records": records,
                }
            )
    if not events:
        return
    trial = copy.deepcopy(account.budget)
    for event in events:
        if trial is not None:  # refuses what does not fit together before anything is written
            trial.charge(event["records"], **_cost(event))
    if account.log is not None:
        account.log.append(events)
    if account.journal is not None:
        account.journal.append_all(account.run_id, events)
    for event in events:
        account.ledger.record(**event)
        if account.budget is not None:
            account.budget.charge(event["records"], **_cost(event))
    for channel, records in firsts:
        account.kept[channel][records] = True


def remaining(
    account: Account,
    *,
    mechanism: str,
    noise_multiplier: float,
    epsilon_excess: float,
    tail_probability: float,
    once: str | None = None,
    label_multiplier: float | None = None,
) -> Remaining:
    """How many more such releases each record may take; None without a filter.

    Args:
        account: What has been spent.
        mechanism: Of the release, as the ledger takes it.
        noise_multiplier: Likewise.
        epsilon_excess: Likewise.
        tail_probability: Likewise.
        once: The channel in which a record's release is drawn once and kept, so that records charged already may be
            released without limit; None where every release is charged.
        label_multiplier: 1/ε of the randomised label that goes with a record's first release, or None. A record whose
            label is not charged yet must be able to pay for both: a run that goes on after a kill draws labels anew.

    Returns:
        Shape (records,), or None.
    """
    if account.budget is None:
        return None
    budget, unpaid = account.budget, None
    if label_multiplier is not None:
        due = ~account.kept["labels"] if "labels" in account.kept else np.ones(budget.num_records, dtype=np.bool_)
        can_pay = budget.remaining(mechanism="randomized-response", noise_multiplier=label_multiplier) >= 1
        unpaid, paying = due & ~can_pay, np.flatnonzero(due & can_pay)
        if len(paying):
            budget = copy.deepcopy(budget)
            budget.charge(paying, mechanism="randomized-response", noise_multiplier=label_multiplier)
    left = budget.remaining(
        mechanism=mechanism,
        noise_multiplier=noise_multiplier,
        epsilon_excess=epsilon_excess,
        tail_probability=tail_probability,
    )
    if once is not None and once in account.kept:
        left = np.where(account.kept[once], LIMITLESS, left)
    return left if unpaid is None else np.where(unpaid, 0, left)


def remaining_updates(account: Account, *, federation: Federation) -> Remaining:
    """How many more noised steps or updates each record may enter; None without a filter or without such updates."""
    privacy = federation.privacy
    if privacy is None or privacy.updates == "none" or privacy.update_multiplier is None:
        return None
    noise = update_noise(privacy)
    num_values = sum(p.numel() for p in federation.model.parameters() if p.requires_grad)
    return remaining(
        account,
        mechanism="gaussian",
        noise_multiplier=privacy.update_multiplier,
        epsilon_excess=noise.epsilon_excess(num_values),
        tail_probability=noise.tail_probability(num_values),
    )


def hold_back(account: Account, left: Remaining, *, records: NDArray[np.int64]) -> None:
    """Note which of the records that would have been used now have nothing left."""
    if left is not None:
        account.held_back[records[left[records] < 1]] = True


def _cost(event: Release) -> dict[str, Any]:
    return {name: event[name] for name in ("mechanism", "noise_multiplier", "epsilon_excess", "tail_probability")}
