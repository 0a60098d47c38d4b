"""Charging: what leaves stands in the ledgers first, once or each time, within the budget, or not at all."""

import multiprocessing
import os
import signal
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import gaussian, make_tiny

from asfl_privacy.accounting import Ledger
from asfl_privacy.accounting.budget import RecordBudget
from asfl_privacy.accounting.journal import Journal
from asfl_privacy.execution import rounds, run_serially
from asfl_privacy.execution.charging import LIMITLESS, charge, open_account, remaining
from asfl_privacy.federated import METHODS, Charge, State
from asfl_privacy.federated.methods import ASFL
from asfl_privacy.federated.sharing import plan_sharing

NUM_RECORDS = 6


def charge_of(*records, **changes):
    values = {
        "channel": "activations",
        "mechanism": "gaussian",
        "noise_multiplier": 2.0,
        "whole_record_multiplier": 1.0,
        "records": np.array(records),
        "once": False,
        "sampler": "lattice",
    }
    return Charge(**(values | changes))


def label_of(*records, epsilon=1.0):
    multiplier = 1.0 / epsilon
    return charge_of(
        *records,
        channel="labels",
        mechanism="randomized-response",
        noise_multiplier=multiplier,
        whole_record_multiplier=multiplier,
        num_classes=10,
        once=True,
    )


def account_with(*, journal=None, **budget):
    privacy = gaussian(budget=RecordBudget(**budget) if budget else None)
    return open_account(Ledger(p=2.0, radius=1.0), privacy=privacy, num_records=NUM_RECORDS, journal=journal)


def journal_at(path):
    return Journal.open(path, p=2.0, radius=1.0, data_digest="0" * 64, num_records=NUM_RECORDS)


def pay(account, *charges, round=0):
    charge(account, charges, num_records=NUM_RECORDS, round=round)


def counts(ledger, channel):
    """Releases of each record in a channel, over all its event classes."""
    found = np.zeros(NUM_RECORDS, dtype=int)
    for event in ledger.event_classes:
        if event.channel == channel:
            records, released = ledger.releases_of(event)
            found[records] += released
    return found.tolist()


def snapshot(account):
    budget = None if account.budget is None else account.budget.state()
    return [account.ledger.counts, budget, {name: mask.tolist() for name, mask in account.kept.items() if mask.any()}]


def test_each_release_is_charged_and_one_that_is_kept_only_the_first_time():
    """Catches: a label charged every round, fresh noise charged once, one channel's memory used for another's."""
    account = account_with()
    pay(account, charge_of(0, 1), label_of(0, 1), round=0)
    pay(account, charge_of(1, 2), label_of(1, 2), round=1)
    pay(account, charge_of(1, 2), label_of(1, 2), round=2)
    assert counts(account.ledger, "activations") == [1, 3, 2, 0, 0, 0]
    assert counts(account.ledger, "labels") == [1, 1, 1, 0, 0, 0]
    assert {event.round for event in account.ledger.event_classes if event.channel == "labels"} == {0, 1}


def test_noise_once_is_charged_the_first_time_alone():
    account = account_with()
    for round in range(3):
        pay(account, charge_of(0, round + 1, once=True), round=round)
    assert counts(account.ledger, "activations") == [1, 1, 1, 1, 0, 0]


def test_every_fact_of_a_release_reaches_the_ledger_and_the_journal(tmp_path):
    """Catches: the sampler's error, the client's multiplier or the classes left behind, or the two accounts differing."""
    journal = journal_at(tmp_path / "data.journal")
    account = account_with(journal=journal)
    update = charge_of(0, 1, 1, channel="updates", client_multiplier=0.5)
    pay(account, charge_of(3, epsilon_excess=1e-9, tail_probability=1e-12), label_of(3), update, round=4)
    first, label, third = account.ledger.event_classes
    assert (first.epsilon_excess, first.tail_probability, first.sampler, first.round) == (1e-9, 1e-12, "lattice", 4)
    assert (first.noise_multiplier, first.whole_record_multiplier) == (2.0, 1.0)
    assert (label.num_classes, label.mechanism, label.noise_multiplier) == (10, "randomized-response", 1.0)
    assert (third.client_multiplier, third.channel) == (0.5, "updates")
    assert counts(account.ledger, "updates") == [1, 2, 0, 0, 0, 0]  # one named twice is charged twice
    assert journal.ledger() == account.ledger
    assert list(journal.runs) == ["run"]


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError(28, "No space left on device")])
def test_a_refused_append_leaves_ledger_filter_and_memory_as_they_were(error):
    """Catches: charging the run's own accounts first, by which a retry would find a label already paid for."""

    class Refusing:
        def append_all(self, run_id, events):
            raise error

    account = account_with(gaussian_budget=1.0, pure_budget=2.0)
    pay(account, charge_of(0), label_of(0))
    before = snapshot(account)
    refusing = replace(account, journal=Refusing())
    with pytest.raises(type(error)):
        pay(refusing, charge_of(0, 1), label_of(0, 1), round=1)
    assert snapshot(account) == before
    pay(account, charge_of(0, 1), label_of(0, 1), round=1)
    assert counts(account.ledger, "activations") == [2, 1, 0, 0, 0, 0]
    assert counts(account.ledger, "labels") == [1, 1, 0, 0, 0, 0]


def test_a_journal_that_was_damaged_meanwhile_stops_the_charge(tmp_path):
    path = tmp_path / "data.journal"
    account = account_with(journal=journal_at(path))
    pay(account, charge_of(0))
    path.write_bytes(b"not a journal\n")
    before = snapshot(account)
    with pytest.raises(ValueError, match=r"data\.journal"):
        pay(account, charge_of(0), round=1)
    assert snapshot(account) == before


@pytest.mark.parametrize(
    ("budget", "charges"),
    [
        ({"gaussian_budget": 0.25}, [charge_of(0, 1)]),  # 1/z² = .25 each, and record 0 has spent one
        ({"gaussian_budget": 0.5, "pure_budget": 0.5}, [charge_of(0, 1), label_of(2)]),  # the second does not fit
        ({"gaussian_budget": 0.6}, [charge_of(1, 2), charge_of(1, 2, channel="updates"), charge_of(1)]),
        ({"gaussian_budget": 0.25, "pure_budget": 1.5}, [label_of(1), charge_of(1, mechanism="laplace")]),
        ({"gaussian_budget": 5.0}, [charge_of(0, epsilon_excess=1e-30)]),
        ({"gaussian_budget": 5.0}, [charge_of(0, tail_probability=1e-300)]),
    ],
)
def test_what_does_not_fit_the_budget_is_refused_and_charges_nothing(tmp_path, budget, charges):
    """Catches: parts of an exchange charged before another part is refused, also where each part alone would fit."""
    if charges[0].mechanism == "randomized-response":
        charges = [charges[0], replace(charges[1], noise_multiplier=1.0)]  # 1 + 1 > 1.5, and each alone fits
    journal = journal_at(tmp_path / "data.journal")
    account = account_with(journal=journal, **budget)
    pay(account, charge_of(0))
    before, written = snapshot(account), journal.path.read_bytes()
    with pytest.raises(ValueError, match="budget"):
        pay(account, *charges, round=1)
    assert snapshot(account) == before
    assert journal.path.read_bytes() == written


def test_what_remains_is_counted_record_by_record():
    """1/z² = .25 of 1.0 is four releases; one that is kept costs nothing more. Catches: a limit for all records alike."""
    account = account_with(gaussian_budget=1.0, pure_budget=1.0)
    release = {"mechanism": "gaussian", "noise_multiplier": 2.0, "epsilon_excess": 0.0, "tail_probability": 0.0}
    pay(account, charge_of(0, 0, 0, 0, 1))
    assert remaining(account, **release).tolist() == [0, 3, 4, 4, 4, 4]
    pay(account, charge_of(2, once=True))
    assert remaining(account, **release, once="activations").tolist() == [0, 3, LIMITLESS, 4, 4, 4]
    assert remaining(account, **release, once="labels").tolist() == [0, 3, 3, 4, 4, 4]
    assert remaining(account_with(), **release) is None


def broken_weights(federation):
    name = "body.1.bias"
    broken = {**federation.initial_weights, name: torch.full_like(federation.initial_weights[name], torch.nan)}
    return replace(federation, initial_weights=broken)


def outside_the_box(federation):
    """The second client alone holds a record outside: the first has collected by then."""
    first, second = federation.clients
    return replace(federation, clients=(first, replace(second, inputs=second.inputs + 1.0)))


class Stale(ASFL):
    """Plans once, for other weights than those that run."""

    def prepare(self, state, *, federation, round):
        moved = State(weights={name: 2.0 * value for name, value in state.weights.items()})
        return plan_sharing(moved, federation=federation)


class Blind(ASFL):
    """Shares records whatever their budget."""

    def collect(self, state, client, **phase):
        return super().collect(state, client, **(phase | {"remaining": None}))


@pytest.mark.parametrize(
    ("spoil", "method", "budget", "words"),
    [
        (broken_weights, ASFL(), None, "not finite|NaN or inf"),
        (outside_the_box, ASFL(), None, "client 1: inputs lie in .* declared input box"),
        (lambda federation: federation, Stale(), None, "changed since the certificate"),
        (lambda federation: federation, Blind(), RecordBudget(gaussian_budget=0.1), "exceed their budget"),
    ],
)
def test_a_refusal_sends_nothing_and_charges_nothing(digits, tmp_path, monkeypatch, spoil, method, budget, words):
    """Catches: charging client by client while others still collect, and charging before collecting."""
    sent = []
    monkeypatch.setattr("asfl_privacy.execution.rounds.deliver", lambda deliveries: sent.append(deliveries) or {})
    placement = "exchange" if budget is None else "input"
    federation = spoil(make_tiny(digits, privacy=gaussian(placement=placement, label_epsilon=1.0, budget=budget)))
    journal = Journal.open(
        tmp_path / "data.journal", p=2.0, radius=1.0, data_digest="0" * 64, num_records=federation.data.num_records
    )
    ledger, empty = Ledger(p=2.0, radius=1.0), journal.path.read_bytes()
    with pytest.raises(ValueError, match=words) as caught:
        run_serially(federation, method, ledger=ledger, journal=journal)
    assert "\n" not in str(caught.value)
    assert ledger.counts.releases == 0
    assert journal.path.read_bytes() == empty
    assert sent == []


def run_until_killed(federation, path, place):
    """In a process of its own: SIGKILL where the round's payloads, or its updates, would leave."""

    def die(*arguments, **named):
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "deliver":
        rounds.deliver = die
    else:
        ASFL.aggregate = die
    run_serially(
        federation, METHODS["asfl"], ledger=Ledger(p=2.0, radius=1.0), journal=Journal.read(path), run_id="killed"
    )


@pytest.mark.parametrize(
    ("place", "privacy", "expected"),
    [
        ("deliver", {"label_epsilon": 1.0}, {"activations": 16, "labels": 16}),
        (
            "aggregate",
            {"updates": "dp-fedavg", "update_multiplier": 3.0},
            {"activations": 16, "updates": 48},
        ),
    ],
)
def test_who_is_killed_before_sending_has_charged(digits, tmp_path, place, privacy, expected):
    """Two clients share 8 of 24 records each; both updates cover all 48. Catches: sending first, a write that waits."""
    federation = make_tiny(digits, privacy=gaussian(**privacy))
    path = Journal.open(
        tmp_path / "data.journal", p=2.0, radius=1.0, data_digest="0" * 64, num_records=federation.data.num_records
    ).path
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(federation, path, place))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    journal = Journal.read(path)
    assert list(journal.runs) == ["killed"]
    ledger = journal.ledger()
    assert {channel: ledger.counts_of(channel).releases for channel in ledger.channels} == expected
    assert ledger.counts.max_releases_per_record == 2
    assert {event.round for event in ledger.event_classes} == {0}


def test_two_runs_on_one_journal_add_up(digits, tmp_path):
    """Catches: a journal that starts anew, and one that holds something else than the ledgers of its runs."""
    path, ledgers = tmp_path / "data.journal", []
    for number in range(2):
        federation = make_tiny(digits, privacy=gaussian(label_epsilon=1.0), seed=number)
        journal = Journal.open(path, p=2.0, radius=1.0, data_digest="0" * 64, num_records=48)
        ledgers.append(Ledger(p=2.0, radius=1.0))
        run_serially(federation, METHODS["asfl"], ledger=ledgers[-1], journal=journal, run_id=f"run {number}")
    journal = Journal.read(path)
    assert [journal.ledger([f"run {number}"]) for number in range(2)] == ledgers
    assert journal.ledger().counts.releases == sum(ledger.counts.releases for ledger in ledgers)
