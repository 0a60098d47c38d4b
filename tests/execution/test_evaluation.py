"""Evaluation: means over all test records, whatever the threads."""

from dataclasses import dataclass, replace

import pytest
import torch
from federations import make_federation
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.execution import evaluation, run_serially
from asfl_privacy.execution.evaluation import Evaluator
from asfl_privacy.federated import METHODS, State
from asfl_privacy.federated.methods.fedavg import FedAvg


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_accuracy_and_loss_are_means_over_all_test_records_whatever_the_threads(digits, monkeypatch, threads):
    """Catches a last batch that counts as a whole one, a batch left out or counted twice, and the training mode."""
    monkeypatch.setattr(evaluation, "BATCH_SIZE", 100)
    federation = make_federation(digits)
    weights = {name: value * 1.1 for name, value in federation.initial_weights.items()}
    with Evaluator(federation, threads=threads) as evaluator:
        accuracy, loss = evaluator.evaluate(weights, round=1)
    twin = federation.replica()
    twin.load(weights, training=False)
    logits = twin.model(digits.test_inputs.clone())
    assert accuracy == int((logits.argmax(1) == digits.test_labels).sum()) / len(digits.test_labels)
    assert loss == pytest.approx(F.cross_entropy(logits, digits.test_labels).item(), rel=1e-5)
    with Evaluator(federation) as alone:
        assert alone.evaluate(weights, round=1) == (accuracy, loss)


def test_fewer_records_than_threads_are_evaluated_too(digits):
    few = replace(digits, test_inputs=digits.test_inputs[:3], test_labels=digits.test_labels[:3])
    federation = make_federation(few)
    with Evaluator(federation, threads=4) as evaluator:
        accuracy, _ = evaluator.evaluate(federation.initial_weights, round=1)
    federation.load(federation.initial_weights, training=False)
    with torch.no_grad():
        right = (federation.model(few.test_inputs).argmax(1) == few.test_labels).sum()
    assert accuracy == int(right) / 3


@dataclass(frozen=True)
class Measured(FedAvg):
    """FedAvg that measures something of its own, in whatever network it is given, and leaves that changed."""

    has_global: bool = True

    @property
    def has_global_network(self):
        return self.has_global

    def measures(self, state, *, federation):
        federation.load(state.weights, training=False)
        with torch.no_grad():
            value = federation.model(federation.data.test_inputs[:1]).sum().item()
            for parameter in federation.model.parameters():
                parameter.zero_()
        return {"own": value}


def test_a_methods_own_measures_stand_beside_the_accuracy_and_change_nothing(digits):
    """Catches measures in the network that trains, and an accuracy of weights that the method says are no network."""
    plain = run_serially(make_federation(digits), METHODS["fedavg"], ledger=None)
    measured = run_serially(make_federation(digits), Measured(), ledger=None)
    blank = run_serially(make_federation(digits), Measured(has_global=False), ledger=None)
    for run in (measured, blank):
        assert all(torch.equal(run.state.weights[name], value) for name, value in plain.state.weights.items())
        assert all(list(evaluation.measures) == ["own"] for evaluation in run.evaluations)
    assert [(e.accuracy, e.loss) for e in measured.evaluations] == [(e.accuracy, e.loss) for e in plain.evaluations]
    assert [(e.accuracy, e.loss) for e in blank.evaluations] == [(None, None)] * 3
    assert [e.measures for e in plain.evaluations] == [{}] * 3


@pytest.mark.parametrize("threads", [1, 3])
def test_measures_are_of_a_replica_and_the_next_evaluation_is_not_changed_by_them(digits, threads):
    federation = make_federation(digits)
    state = State(weights=federation.initial_weights)
    federation.load(state.weights, training=False)
    with Evaluator(federation, threads=threads) as evaluator:
        before = evaluator.evaluate(state.weights, round=1)
        assert evaluator.measures(Measured(), state, round=1) == evaluator.measures(Measured(), state, round=2)
        assert evaluator.evaluate(state.weights, round=1) == before
    assert all(torch.equal(value, state.weights[name]) for name, value in federation.model.state_dict().items())
