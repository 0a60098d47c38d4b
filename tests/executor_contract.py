"""What two runs of the same seed must have in common, to the bit."""

import dataclasses

import numpy as np
import torch


def assert_same_run(first, second):
    """Weights, what clients and server keep, evaluations, ledger, bytes and counts: to the bit."""
    assert_same_tensors(first.state.weights, second.state.weights)
    assert_same_tensors(first.state.server, second.state.server)
    assert list(first.state.clients) == list(second.state.clients)
    for client in first.state.clients:
        assert_same_tensors(first.state.clients[client], second.state.clients[client])
    assert [measured_apart(e) for e in first.evaluations] == [measured_apart(e) for e in second.evaluations]
    assert (first.ledger is None) == (second.ledger is None)
    assert first.ledger == second.ledger
    for name in ("rounds_done", "largest_plan", "traffic", "drawn", "drawn_remote", "held_back", "failures"):
        assert getattr(first, name) == getattr(second, name), name
    if first.account is not None:
        assert np.array_equal(first.account.held_back, second.account.held_back)


def assert_same_tensors(first, second):
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def measured_apart(evaluation):
    """The evaluation without what is measured: times and memory."""
    return dataclasses.replace(evaluation, seconds={}, peak_memory=0)
