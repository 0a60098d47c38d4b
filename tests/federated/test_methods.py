"""Each method's invariants, from its paper."""

import pytest
import torch
from federations import make_federation
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.sharing import collect_activations
from asfl_privacy.federated.streams import numpy_stream


def train(method, state, client, *, federation, own=None, received=None, round=0):
    """The phase without private updates, whose budget is nobody's."""
    return method.train(
        state,
        client,
        federation=federation,
        plan=None,
        own=own,
        received=received,
        remaining=None,
        round=round,
    )


def test_one_client_fedavg_is_plain_sgd_bit_for_bit(digits):
    """The same mini-batches through a loop written out here."""
    federation = make_federation(digits, clients=1, cohort=1, partition="iid")
    method, state = METHODS["fedavg"], State(weights=federation.initial_weights)
    twin = make_federation(digits, clients=1, cohort=1, partition="iid").model
    for round in range(3):
        update = train(method, state, 0, federation=federation, round=round)
        state = method.aggregate(state, {0: update}, federation=federation, round=round)
        rng = numpy_stream(0, round=round, client=0, purpose="full steps")
        for _ in range(4 + 3):
            batch = torch.from_numpy(rng.choice(len(digits.train_labels), size=16, replace=False))
            twin.zero_grad()
            F.cross_entropy(twin(digits.train_inputs[batch]), digits.train_labels[batch]).backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
    assert all(torch.equal(value, state.weights[name]) for name, value in twin.state_dict().items())


def test_tail_steps_leave_the_head_untouched_and_move_the_tail(digits):
    """Catches a tail round on the whole network, and gradients that reach the head through own activations."""
    federation = make_federation(digits, clients=2, cohort=2, full_steps=0)
    state = State(weights=federation.initial_weights)
    collected = {c: collect_activations(state, c, federation=federation, plan=None, round=0) for c in (0, 1)}
    assert not any(done.payload.activations.requires_grad for done in collected.values())
    update = train(
        METHODS["asfl"], state, 0, federation=federation, own=collected[0].own, received=collected[1].payload
    )
    after = update.weights
    head = {name for name in after if name.split(".")[0] in ("normalize", "conv1", "conv2")}
    assert head
    assert all(torch.equal(after[name], state.weights[name]) for name in head)
    assert not any(torch.equal(after[name], state.weights[name]) for name in after if name not in head)
    assert update.drawn == 4 * 16
    assert 0 < update.drawn_remote < update.drawn
    assert update.charges == ()


def test_a_client_without_a_partner_trains_its_tail_on_its_own_activations(digits):
    federation = make_federation(digits, clients=1, cohort=1, partition="iid", full_steps=0)
    state = State(weights=federation.initial_weights)
    own = collect_activations(state, 0, federation=federation, plan=None, round=0).own
    update = train(METHODS["asfl"], state, 0, federation=federation, own=own)
    assert (update.drawn, update.drawn_remote) == (4 * 16, 0)
    assert not torch.equal(update.weights["classifier.weight"], state.weights["classifier.weight"])


@pytest.mark.parametrize("cohort", [1, 2, 5, 6])
def test_a_cohort_is_exactly_as_many_distinct_clients_as_asked(digits, cohort):
    federation = make_federation(digits, cohort=cohort)
    drawn = [sample_cohort(federation, round=round) for round in range(20)]
    assert all(len(set(clients)) == cohort and list(clients) == sorted(clients) for clients in drawn)
    assert cohort == 6 or len(set(drawn)) > 1


def test_a_cohort_larger_than_the_clients_is_refused(digits):
    with pytest.raises(ValueError, match="cohort 7 must lie in 1 to 6"):
        make_federation(digits, cohort=7)
