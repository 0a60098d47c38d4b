"""What is evaluated, in which mode, and what seeds reach."""

import pytest
import torch
from federations import gaussian, make_federation

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import run_serially
from asfl_privacy.federated import METHODS, State
from asfl_privacy.federated.sharing import collect_activations, route_activations

OWN = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "iid"}


def run(federation, method="asfl"):
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    return run_serially(federation, METHODS[method], ledger=ledger)


@pytest.mark.parametrize("options", [{}, OWN])
def test_the_accuracy_is_that_of_the_averaged_weights_on_the_test_records(digits, options):
    """Catches evaluation on training records, of one client's weights, and in training mode."""
    federation = make_federation(digits, **options)
    result = run(federation)
    federation.model.load_state_dict(result.state.weights)
    federation.model.eval()
    with torch.no_grad():
        predicted = federation.model(digits.test_inputs.clone()).argmax(1)
    assert result.evaluations[-1].accuracy == int((predicted == digits.test_labels).sum()) / len(digits.test_labels)


def test_activations_are_computed_in_evaluation_mode(digits):
    """Catches dropout in what is shared."""
    federation = make_federation(digits, **OWN)
    state = State(weights=federation.initial_weights)
    payloads = [collect_activations(state, 0, federation=federation, plan=None, round=0).payload for _ in range(2)]
    assert torch.equal(payloads[0].activations, payloads[1].activations)


def test_modules_that_the_factory_froze_stay_frozen_and_others_learn(digits):
    federation = make_federation(digits, **OWN)
    result = run(federation)
    before, after = federation.initial_weights, result.state.weights
    assert torch.equal(after["head.2.running_mean"], before["head.2.running_mean"])
    assert not torch.equal(after["tail.1.running_mean"], before["tail.1.running_mean"])
    assert after["tail.1.num_batches_tracked"].dtype == torch.int64


def test_dropout_draws_from_the_run_and_not_from_what_was_drawn_before(digits):
    first = run(make_federation(digits, **OWN))
    torch.manual_seed(99)
    torch.rand(5)
    second = run(make_federation(digits, **OWN))
    assert all(torch.equal(value, second.state.weights[name]) for name, value in first.state.weights.items())


def test_a_parameter_that_the_network_does_not_use_stays_as_it_is(digits):
    federation = make_federation(digits, **OWN | {"model_name": "own_nets:unused_parameter"})
    result = run(federation)
    assert torch.allclose(result.state.weights["tail.0.extra"], federation.initial_weights["tail.0.extra"], rtol=1e-6)


@pytest.mark.parametrize("privacy", [None, gaussian()])
def test_a_block_that_works_in_place_leaves_the_data_as_it_was(digits, privacy):
    """Catches evaluation and checks on views of the data set."""
    before = digits.train_inputs.clone(), digits.test_inputs.clone()
    federation = make_federation(digits, model_name="own_nets:in_place", exchange_layer="first", privacy=privacy)
    held = [client.inputs.clone() for client in federation.clients]
    run(federation)
    assert torch.equal(digits.train_inputs, before[0])
    assert torch.equal(digits.test_inputs, before[1])
    assert all(torch.equal(client.inputs, inputs) for client, inputs in zip(federation.clients, held, strict=True))


def test_pairs_change_from_round_to_round(digits):
    federation = make_federation(digits, cohort=6)
    state = State(weights=federation.initial_weights)
    payloads = {c: collect_activations(state, c, federation=federation, plan=None, round=0).payload for c in range(6)}
    pairings = {
        tuple(d.receiver for d in route_activations(payloads, federation=federation, round=round)) for round in range(9)
    }
    assert len(pairings) > 3


def test_the_seed_reaches_partition_and_weights(digits):
    first, second = (make_federation(digits, seed=seed) for seed in (0, 1))
    assert [len(c.records) for c in first.clients] != [len(c.records) for c in second.clients]
    assert not torch.equal(first.initial_weights["fc1.1.weight"], second.initial_weights["fc1.1.weight"])


def test_the_plan_with_the_most_noise_is_kept(digits):
    """Catches the least, and the last. Sensitivities fall here; scales of 10 bits may tie."""
    result = run(make_federation(digits, privacy=gaussian(placement="exchange"), rounds=3, lr=1e-3))
    moved = [e.sensitivity for e in result.evaluations]
    assert moved[0] > moved[-1]
    assert result.largest_plan.sensitivity == max(moved)
    assert result.largest_plan.scale == max(e.noise_scale for e in result.evaluations)


@pytest.mark.parametrize(("p", "radius"), [(1.0, 1.0), (2.0, 0.5), (2.0, "any")])
def test_a_ledger_of_another_promise_is_refused(digits, p, radius):
    """Catches a statement about another norm or radius than the noise was made for."""
    with pytest.raises(ValueError, match="make the ledger with the run's own"):
        run_serially(make_federation(digits, privacy=gaussian()), METHODS["asfl"], ledger=Ledger(p=p, radius=radius))
