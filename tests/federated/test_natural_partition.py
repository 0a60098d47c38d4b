"""Clients that are groups of the data: each holds its own records, the others' are in nobody's account."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import gaussian, make_federation

from asfl_privacy.accounting import Ledger
from asfl_privacy.data import Dataset
from asfl_privacy.execution import begin_run, run_rounds, run_serially
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS
from asfl_privacy.run_facts import clients_of_records

SIZES = [7, 20, 9, 12, 16]
NATURAL = {
    "partition": "natural",
    "clients": 3,
    "cohort": 2,
    "rounds": 2,
    "tail_steps": 2,
    "full_steps": 1,
    "batch_size": 4,
    "model_name": "federations:tiny_net",
    "exchange_layer": "body",
}


@pytest.fixture
def written(digits) -> Dataset:
    """64 digits of five writers, in turn, so that no writer's records lie together."""
    groups = np.repeat(np.arange(5), SIZES)[np.random.default_rng(0).permutation(64)]
    return replace(
        digits,
        train_inputs=digits.train_inputs[:64],
        train_labels=digits.train_labels[:64],
        train_groups=torch.from_numpy(groups),
    )


def test_each_client_holds_the_records_of_one_writer(written):
    """Catches inputs in another order than the groups."""
    federation = make_federation(written, **NATURAL)
    writers = []
    for client in federation.clients:
        (writer,) = set(written.train_groups[client.records].tolist())
        assert client.num_records == SIZES[writer]
        assert torch.equal(client.inputs, written.train_inputs[written.train_groups == writer])
        writers.append(writer)
    assert len(set(writers)) == 3


def test_another_seed_draws_other_writers(written):
    drawn = {
        tuple(sorted(client.num_records for client in make_federation(written, seed=seed, **NATURAL).clients))
        for seed in range(8)
    }
    assert len(drawn) > 1


def test_records_of_writers_that_were_not_drawn_are_never_released(written):
    """Catches records that a ledger counts for client 0 because nobody holds them."""
    federation = make_federation(written, privacy=gaussian(), **NATURAL)
    ledger = Ledger(p=2.0, radius=1.0)
    run_serially(federation, METHODS["asfl"], ledger=ledger)
    holders = clients_of_records(federation)
    held = np.concatenate([client.records for client in federation.clients])
    assert set(np.flatnonzero(holders == 3)) == set(range(64)) - set(held.tolist())
    released = {int(record) for event in ledger.event_classes for record in ledger.releases_of(event)[0]}
    assert released
    assert released <= set(held.tolist())
    ledger.clients = holders
    by_record, by_client = (ledger.epsilon(delta=1e-5, unit=unit) for unit in ("record", "client"))
    assert 0.0 < by_record.high <= by_client.high


def test_processes_train_natural_clients_to_the_same_bits(written):
    """Workers are given the data set without values: groups must not be looked at there."""
    serial, parallel = (make_federation(written, **NATURAL) for _ in range(2))
    expected = run_serially(serial, METHODS["asfl"], ledger=None).state.weights
    with make_executor("processes", parallel, METHODS["asfl"], workers=2) as executor:
        start = begin_run(parallel, ledger=None)
        found = run_rounds(parallel, METHODS["asfl"], executor=executor, start=start).state.weights
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"clients": 6}, "clients 6 with partition natural must be at most 5, the number of groups"),
        ({"data": None}, "partition natural needs data that say whose each record is"),
    ],
)
def test_too_many_clients_and_data_without_groups_are_refused(written, changes, match):
    data = replace(written, train_groups=None) if "data" in changes else written
    with pytest.raises(ValueError, match=match):
        make_federation(data, **NATURAL | {key: value for key, value in changes.items() if key != "data"})
