"""What leaves a client, and what never does."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import gaussian, make_federation

from asfl_privacy.federated import State
from asfl_privacy.federated.sharing import (
    NOISED_INPUTS,
    collect_activations,
    label_dtype,
    plan_sharing,
    route_activations,
    tail_pool,
)


def collect(federation, client=0, round=0, state=None):
    state = state or State(weights=federation.initial_weights)
    plan = plan_sharing(state, federation=federation)
    return collect_activations(state, client, federation=federation, plan=plan, round=round), plan


@pytest.mark.parametrize(("tail_steps", "batches"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)])
def test_a_client_shares_half_of_tau_prime_batches_rounded_up_each_record_once(digits, tail_steps, batches):
    federation = make_federation(digits, tail_steps=tail_steps, batch_size=8, partition="iid")
    payload = collect(federation)[0].payload
    assert len(payload.labels) == batches * 8
    assert len(set(payload.records.tolist())) == batches * 8
    assert set(payload.records) <= set(federation.clients[0].records)


def test_a_client_with_few_records_shares_each_of_them_once(digits):
    federation = make_federation(digits, batch_size=5000)
    payload = collect(federation)[0].payload
    assert sorted(payload.records) == sorted(federation.clients[0].records)


def test_clean_activations_are_the_heads_outputs_with_their_labels(digits):
    federation = make_federation(digits)
    payload = collect(federation)[0].payload
    records = torch.from_numpy(payload.records)
    federation.load(federation.initial_weights, training=False)
    assert torch.equal(payload.activations, federation.split.head(digits.train_inputs[records]))
    assert torch.equal(payload.labels.long(), digits.train_labels[records])
    assert payload.labels.dtype == torch.uint8


@pytest.mark.parametrize("placement", ["input", "after:conv1", "exchange"])
def test_noised_activations_never_equal_the_clean_ones_and_own_ones_may_stay_clean(digits, placement):
    """Catches clean activations in the payload, whatever the placement."""
    federation = make_federation(digits, privacy=gaussian(placement=placement, noise_multiplier=0.5))
    collected, plan = collect(federation)
    clean = collect(make_federation(digits))[0].payload
    assert np.array_equal(collected.payload.records, clean.records)
    assert torch.equal(collected.own.inputs, clean.activations)
    changed = (collected.payload.activations != clean.activations).flatten(1).any(1)
    assert bool(changed.all())
    if placement == "exchange":
        residual = (collected.payload.activations - clean.activations).flatten().double()
        # 32 × 512 residuals: the sample deviation is within 3 % of σ; σ/2 and 2σ are far outside
        assert residual.std().item() == pytest.approx(plan.noise_stddev, rel=0.03)


def test_own_released_trains_on_exactly_what_was_sent(digits):
    federation = make_federation(digits, privacy=gaussian(own="released"))
    collected, _ = collect(federation)
    assert torch.equal(collected.own.inputs, collected.payload.activations)


def test_fresh_noise_differs_between_rounds_and_clients(digits):
    """Catches a stream keyed without round or client."""
    federation = make_federation(digits, privacy=gaussian(placement="exchange"), partition="iid", batch_size=5000)
    clean = make_federation(digits, partition="iid", batch_size=5000)

    def noise(client, round, *, by_record):
        noised, exact = collect(federation, client, round)[0].payload, collect(clean, client, round)[0].payload
        order = np.argsort(noised.records) if by_record else np.arange(len(noised.records))
        return (noised.activations - exact.activations)[torch.from_numpy(order)][:100]

    for by_record in (True, False):  # the same record, and the same place in the payload
        draws = [noise(0, 0, by_record=by_record), noise(0, 1, by_record=by_record), noise(1, 0, by_record=by_record)]
        for a in range(3):
            for b in range(a):
                correlation = torch.corrcoef(torch.stack([draws[a].flatten(), draws[b].flatten()]))[0, 1].item()
                assert abs(correlation) < 6 / math.sqrt(draws[a].numel())


def test_noise_once_differs_between_clients(digits):
    """Catches a kept stream that every client shares."""
    federation = make_federation(digits, privacy=gaussian(noise="once"), partition="iid")
    noises = []
    for client in (0, 1):
        kept = collect(federation, client)[0].client_state[NOISED_INPUTS]
        noises.append((kept - federation.clients[client].inputs)[:100].flatten())
    correlation = torch.corrcoef(torch.stack(noises))[0, 1].item()
    assert abs(correlation) < 6 / math.sqrt(noises[0].numel())


def test_noise_once_is_drawn_once_a_record_and_kept(digits):
    """Catches noise redrawn each round: averaging rounds would then remove it."""
    federation = make_federation(digits, privacy=gaussian(noise="once"), partition="iid", batch_size=5000)
    state = State(weights=federation.initial_weights)
    first, plan = collect(federation, state=state)
    state = replace(state, clients={0: first.client_state})
    second, _ = collect(federation, round=1, state=state)
    assert first.client_state[NOISED_INPUTS] is second.client_state[NOISED_INPUTS]
    order = [torch.from_numpy(np.argsort(p.records)) for p in (first.payload, second.payload)]
    assert torch.equal(first.payload.activations[order[0]], second.payload.activations[order[1]])
    residual = (first.client_state[NOISED_INPUTS] - federation.clients[0].inputs).double()
    assert residual.std().item() == pytest.approx(plan.noise_stddev, rel=0.03)


def test_noise_once_follows_the_head_of_the_round(digits):
    """The kept thing is the noised input; its activation moves with the head."""
    federation = make_federation(digits, privacy=gaussian(noise="once"), batch_size=5000)
    state = State(weights=federation.initial_weights)
    first, _ = collect(federation, state=state)
    moved = {name: value * 1.5 if "conv" in name else value for name, value in state.weights.items()}
    second, _ = collect(federation, round=1, state=State(weights=moved, clients={0: first.client_state}))
    assert not torch.equal(first.payload.activations, second.payload.activations)


def test_the_plan_is_made_for_the_head_as_it_is_now(digits):
    """Catches noise calibrated once for the initial head: doubled convolutions need more of it."""
    federation = make_federation(digits, privacy=gaussian(placement="exchange"))
    weights = federation.initial_weights
    doubled = {name: value * 2 if name.endswith("0.weight") else value for name, value in weights.items()}
    first = plan_sharing(State(weights=weights), federation=federation)
    second = plan_sharing(State(weights=doubled), federation=federation)
    assert second.noise_stddev == pytest.approx(4 * first.noise_stddev, rel=1e-9)
    assert second.noise_multiplier == first.noise_multiplier


def test_a_plan_for_other_weights_is_refused(digits):
    federation = make_federation(digits, privacy=gaussian(placement="exchange"))
    weights = federation.initial_weights
    plan = plan_sharing(State(weights=weights), federation=federation)
    moved = State(weights={name: value * 2 for name, value in weights.items()})
    with pytest.raises(ValueError, match="changed since the certificate"):
        collect_activations(moved, 0, federation=federation, plan=plan, round=0)


@pytest.mark.parametrize("privacy", [None, gaussian()])
def test_a_block_that_remembers_is_refused_before_it_can_send_what_it_kept(digits, privacy):
    """Catches a client's clean records in the next client's payload, behind any amount of noise."""
    federation = make_federation(digits, model_name="own_nets:keeps", exchange_layer="head", privacy=privacy)
    with pytest.raises(ValueError, match="changed itself while running"):
        collect(federation)


def test_activations_that_are_not_finite_never_leave(digits):
    federation = make_federation(digits)
    broken = {
        name: torch.full_like(v, math.nan) if "conv2" in name else v for name, v in federation.initial_weights.items()
    }
    with pytest.raises(ValueError, match="not finite"):
        collect(federation, state=State(weights=broken))


def test_payloads_go_to_the_partner_and_the_union_keeps_both_sides_labels(digits):
    federation = make_federation(digits, clients=4)
    collected = {client: collect(federation, client)[0] for client in range(4)}
    deliveries = route_activations(
        {client: done.payload for client, done in collected.items()}, federation=federation, round=0
    )
    assert sorted(d.receiver for d in deliveries) == [0, 1, 2, 3]
    assert all(d.receiver != d.payload.sender for d in deliveries)
    own, received = collected[deliveries[0].receiver].own, deliveries[0].payload
    pool = tail_pool(own, received)
    assert pool.num_own == len(own.labels)
    assert torch.equal(pool.inputs, torch.cat([own.inputs, received.activations]))
    assert torch.equal(pool.labels, torch.cat([own.labels, received.labels.long()]))
    assert tail_pool(own, None) is own


def test_labels_are_sent_in_a_type_that_holds_them_all():
    assert label_dtype(256) == torch.uint8
    assert label_dtype(257) == torch.int32
