"""Diagnostics against gradients written out by hand."""

import pytest
import torch
from federations import make_federation, make_tiny
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated.diagnostics import client_drift, diagnose


def whole_gradient(federation, inputs, labels):
    loss = F.cross_entropy(federation.model(inputs), labels)
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(federation.model.parameters()))]
    ).double(), loss


def test_the_global_gradient_is_that_of_all_records_at_once(digits):
    """Catches: an unweighted mean over clients of unequal size, a sum, a batch counted as a client."""
    federation = make_federation(digits, partition="dirichlet:0.5")
    found = diagnose(federation, federation.initial_weights, batch_size=50)
    gradient, loss = whole_gradient(federation, digits.train_inputs, digits.train_labels)
    assert found.squared_gradient_norm == pytest.approx(float(gradient.square().sum()), rel=1e-5)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)


def test_dissimilarity_is_the_weighted_spread_of_the_clients_gradients(digits):
    federation = make_federation(digits, partition="dirichlet:0.5")
    found = diagnose(federation, federation.initial_weights)
    federation.load(federation.initial_weights, training=False)
    shares = [client.num_records / digits.num_records for client in federation.clients]
    gradients = [whole_gradient(federation, client.inputs, client.labels)[0] for client in federation.clients]
    mean = sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
    by_hand = sum(s * float((g - mean).square().sum()) for s, g in zip(shares, gradients, strict=True))
    assert found.dissimilarity == pytest.approx(by_hand, rel=1e-4)
    assert by_hand > 0


def test_equal_clients_do_not_disagree_and_nothing_is_trained(digits):
    federation = make_tiny(digits, clients=1, cohort=1)
    before = {name: value.clone() for name, value in federation.initial_weights.items()}
    state = torch.get_rng_state()
    found = diagnose(federation, federation.initial_weights)
    assert found.dissimilarity == pytest.approx(0.0, abs=1e-12 * found.squared_gradient_norm)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in federation.model.state_dict().items())


def test_drift_is_the_spread_of_where_clients_end():
    start = {"w": torch.zeros(2), "count": torch.tensor(3)}
    ends = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-1.0, -1.0])}]
    assert client_drift(start, ends, trained=("w",)) == pytest.approx((1 + 1 + 2) / 3)
    assert client_drift(start, [{"w": torch.ones(2)}] * 3, trained=("w",)) == 0.0


def test_a_run_that_diverged_is_refused(digits):
    federation = make_tiny(digits)
    broken = {name: value * float("nan") for name, value in federation.initial_weights.items()}
    with pytest.raises(ValueError, match="not finite: training diverged"):
        diagnose(federation, broken)
