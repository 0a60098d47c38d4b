"""Clients' networks after local work: those that a round averages, under every method."""

from dataclasses import dataclass, replace

import pytest
import torch
from federations import gaussian, make_federation

from asfl_privacy.execution import SerialExecutor, begin_run, run_rounds
from asfl_privacy.execution.local_results import local_networks
from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.methods import ASFL
from asfl_privacy.federated.weights import average_weights


def results_and_round(federation, name, *, rounds):
    """Networks of the last round's cohort, its state before and its state after, as `run_rounds` has them."""
    method, states = METHODS[name], [begin_run(federation, ledger=None)]
    with SerialExecutor(federation, method) as executor:
        after = run_rounds(federation, method, executor=executor, start=states[0], after_round=states.append)
        before = states[-2]
        assert before.rounds_done == rounds - 1
        found = local_networks(
            before.state,
            sample_cohort(federation, round=rounds - 1),
            federation=federation,
            method=method,
            executor=executor,
            round=rounds - 1,
        )
    return found, before.state, after.state


@pytest.mark.parametrize("name", ["fedavg", "asfl", "moon", "splitfed-v1"])
def test_their_mean_is_what_the_round_makes(digits, name):
    """Catches: a round without sharing, client states of another round, other draws, an average taken already."""
    federation = make_federation(digits)
    found, before, after = results_and_round(federation, name, rounds=3)
    sizes = [federation.clients[client].num_records for client in sorted(found)]
    mean = average_weights([found[client] for client in sorted(found)], num_records=sizes, before=before.weights)
    assert all(torch.equal(mean[key], value) for key, value in after.weights.items())


@pytest.mark.parametrize("name", ["scaffold", "fedpvr", "fedvarp"])
def test_corrected_methods_mean_is_the_server_step(digits, name):
    """Catches: local work of plain FedAvg in place of the method's, which in the third round is corrected."""
    federation = make_federation(digits, cohort=6)  # with all clients these servers take the plain mean
    found, _, after = results_and_round(federation, name, rounds=3)
    for key, value in after.weights.items():
        if value.is_floating_point():
            mean = torch.stack([found[client][key].double() for client in sorted(found)]).mean(0)
            torch.testing.assert_close(mean, value.double(), rtol=1e-4, atol=1e-6)
    plain, _, _ = results_and_round(federation, "fedavg", rounds=3)
    assert any(not torch.equal(plain[0][key], found[0][key]) for key in plain[0])


def test_the_state_stays_as_it_is(digits):
    federation, method = make_federation(digits), METHODS["asfl"]
    state = begin_run(federation, ledger=None).state
    before = {name: value.clone() for name, value in state.weights.items()}
    with SerialExecutor(federation, method) as executor:
        asked = {"federation": federation, "method": method, "executor": executor, "round": 0}
        first = local_networks(state, range(6), **asked)
        second = local_networks(state, range(6), **asked)
    assert sorted(first) == list(range(6))
    assert all(torch.equal(value, before[name]) for name, value in state.weights.items())
    assert all(torch.equal(value, second[c][name]) for c in first for name, value in first[c].items())


@pytest.mark.parametrize("name", ["fedproto", "splitfed-v2"])
def test_methods_that_leave_clients_no_network_are_refused(digits, name):
    """Catches: a scatter of zero that no training was behind."""
    federation, method = make_federation(digits), METHODS[name]
    state = begin_run(federation, ledger=None).state
    with (
        SerialExecutor(federation, method) as executor,
        pytest.raises(ValueError, match=f"method {name} leaves no client"),
    ):
        local_networks(state, range(6), federation=federation, method=method, executor=executor, round=0)


def test_a_private_run_is_refused(digits):
    """Catches: releases that no ledger holds."""
    federation, method = make_federation(digits, privacy=gaussian()), METHODS["asfl"]
    state = State(weights=federation.initial_weights)
    with SerialExecutor(federation, method) as executor, pytest.raises(ValueError, match="no ledger counts"):
        local_networks(state, range(6), federation=federation, method=method, executor=executor, round=0)


@dataclass(frozen=True)
class Remembering(ASFL):
    """Its clients note in the collect phase what its training then needs."""

    def collect(self, state, client, **named):
        return replace(super().collect(state, client, **named), client_state={"note": torch.tensor(float(client))})

    def train(self, state, client, **named):
        assert state.clients[client]["note"] == client
        return super().train(state, client, **named)


def test_what_clients_keep_in_the_collect_phase_is_there_when_they_train(digits):
    """Catches: the state before the exchange handed to the local steps."""
    federation, method = make_federation(digits), Remembering()
    state = begin_run(federation, ledger=None).state
    with SerialExecutor(federation, method) as executor:
        found = local_networks(state, range(6), federation=federation, method=method, executor=executor, round=0)
    assert len(found) == 6
    assert len(state.clients) == 0
