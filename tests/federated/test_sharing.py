"""What leaves a client, and what never does."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import all_rows, gaussian, make_federation, make_tiny

from asfl_privacy.federated import State
from asfl_privacy.federated.sharing import (
    NOISED_INPUTS,
    RANDOMIZED_LABELS,
    collect_activations,
    label_dtype,
    plan_sharing,
    route_activations,
    tail_pool,
)
from asfl_privacy.mechanisms.lattice import encode, truncate


def collect(federation, client=0, round=0, state=None, remaining=None):
    state = state or State(weights=federation.initial_weights)
    plan = plan_sharing(state, federation=federation)
    collected = collect_activations(state, client, federation=federation, plan=plan, remaining=remaining, round=round)
    return collected, plan


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
    assert second.client_state is None  # what it kept stays
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
    # Δ holds rounding of the forward pass, which grows by less, and the scale has 10 bits: 2^-9 above what is due
    assert second.noise_stddev == pytest.approx(4 * first.noise_stddev, rel=2**-9)
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
    assert torch.equal(all_rows(pool), torch.cat([own.inputs, received.activations]))
    assert torch.equal(pool.labels, torch.cat([own.labels, received.labels.long()]))
    assert tail_pool(own, None) is own
    flat = replace(received, activations=received.activations.flatten(1)[:, :1])
    with pytest.raises(ValueError, match="cut both networks at the same layer"):
        tail_pool(own, flat)


def test_labels_are_sent_in_a_type_that_holds_them_all():
    assert label_dtype(256) == torch.uint8
    assert label_dtype(257) == torch.int32


def by_record(payload, values):
    return dict(zip(payload.records.tolist(), values.tolist(), strict=True))


def test_what_is_charged_is_what_the_payload_holds(digits):
    """Catches: other records, another multiplier or sampler in the ledger than in the noise, labels that go uncharged."""
    for reproducible, sampler in ((True, "seeded"), (False, "lattice")):
        federation = make_tiny(digits, privacy=gaussian(label_epsilon=2.0, reproducible=reproducible))
        collected, plan = collect(federation)
        activations, labels = collected.payload.charges
        for charged in (activations, labels):
            assert np.array_equal(charged.records, collected.payload.records)
            assert charged.sampler == sampler
        assert (activations.channel, activations.mechanism, activations.once) == ("activations", "gaussian", False)
        assert activations.noise_multiplier == plan.noise_multiplier == 2.0
        assert activations.whole_record_multiplier == plan.whole_record_multiplier
        assert activations.epsilon_excess == plan.lattice.epsilon_excess(64) > 0.0
        assert activations.tail_probability == plan.lattice.tail_probability(64) > 0.0
        assert (labels.channel, labels.mechanism, labels.once) == ("labels", "randomized-response", True)
        assert (labels.noise_multiplier, labels.num_classes, labels.client_multiplier) == (0.5, 10, None)
    once, _ = collect(make_tiny(digits, privacy=gaussian(noise="once")))
    assert [charged.once for charged in once.payload.charges] == [True]
    assert collect(make_tiny(digits))[0].payload.charges == ()


def test_noise_from_the_system_differs_from_run_to_run_and_seeded_noise_does_not(digits):
    """Catches: a seed behind `reproducible=False`, for activations or labels; payloads of one record set."""
    for changes in ({"noise": "fresh"}, {"noise": "once"}, {"placement": "exchange"}):
        seeded = make_tiny(digits, privacy=gaussian(label_epsilon=0.1, **changes))
        payloads = [collect(seeded)[0].payload for _ in range(2)]
        assert torch.equal(payloads[0].activations, payloads[1].activations)
        assert torch.equal(payloads[0].labels, payloads[1].labels)
    fresh = make_tiny(digits, batch_size=24, privacy=gaussian(label_epsilon=0.1, reproducible=False))
    first, second = (collect(fresh)[0].payload for _ in range(2))
    assert np.array_equal(first.records, second.records)
    assert bool((first.activations != second.activations).flatten(1).any(1).all())
    assert not torch.equal(first.labels, second.labels)  # equal with probability about 10^-24


def test_a_label_is_randomised_once_and_the_same_answer_is_sent_ever_after(digits):
    """Catches: a fresh draw a round, by which averaging gives the label away. Round 1 shares other records too."""
    federation = make_federation(digits, privacy=gaussian(label_epsilon=1.0), partition="iid")
    state, sent = State(weights=federation.initial_weights), {}
    for round in range(4):
        collected, _ = collect(federation, round=round, state=state)
        answers = by_record(collected.payload, collected.payload.labels)
        assert all(sent.get(record, answer) == answer for record, answer in answers.items())
        assert round == 0 or sent.keys() & answers.keys()
        sent |= answers
        state = replace(state, clients={0: collected.client_state})
    remembered = state.clients[0][RANDOMIZED_LABELS]
    assert int((remembered >= 0).sum()) == len(sent)  # never shared, never drawn


def test_labels_are_sent_randomised_and_own_clean_ones_stay_clean(digits):
    """Catches: clean labels in the payload, noisy ones in the own pool, a mask on the wrong side."""
    federation = make_federation(digits, privacy=gaussian(label_epsilon=1.0), partition="iid", batch_size=5000)
    collected, _ = collect(federation)
    true = digits.train_labels[torch.from_numpy(collected.payload.records)]
    assert torch.equal(collected.own.labels, true)
    assert not bool(collected.own.noisy.any())
    assert np.array_equal(collected.own.records, collected.payload.records)
    kept = float((collected.payload.labels.long() == true).double().mean())
    # e/(e + 9) = .232 of about 200 labels: within 5 standard deviations, .15; in the clear it is 1
    assert kept == pytest.approx(math.e / (math.e + 9), abs=5 * math.sqrt(0.178 / len(true)))
    assert collected.payload.labels.dtype == torch.uint8
    pool = tail_pool(collected.own, collected.payload)
    assert pool.noisy.tolist() == [False] * len(true) + [True] * len(true)
    assert torch.equal(pool.labels[len(true) :], collected.payload.labels.long())


def test_own_released_holds_nothing_but_what_was_sent(digits):
    """Catches: clean labels or activations in a tail round that is meant to cost nothing more."""
    federation = make_federation(digits, privacy=gaussian(own="released", label_epsilon=1.0), partition="iid")
    collected, _ = collect(federation)
    assert torch.equal(collected.own.inputs, collected.payload.activations)
    assert torch.equal(collected.own.labels, collected.payload.labels.long())
    assert bool(collected.own.noisy.all())
    assert collected.own.records is None


def test_labels_in_the_clear_leave_no_mask(digits):
    collected, _ = collect(make_federation(digits, privacy=gaussian()))
    assert collected.own.noisy is None
    assert tail_pool(collected.own, collected.payload).noisy is None


def test_records_past_their_budget_are_held_back_and_the_others_fill_the_payload(digits):
    """Catches: a filter that is not asked, or one that drops drawn records where others could be shared."""
    federation = make_tiny(digits, privacy=gaussian(label_epsilon=1.0))
    mine = federation.clients[0].records
    remaining = np.zeros(48, dtype=np.int64)
    remaining[mine[::2]] = 1
    payload = collect(federation, remaining=remaining)[0].payload
    assert len(payload.records) == 8  # one batch of 8, of 12 that are left
    assert set(payload.records) <= set(mine[::2])
    remaining[mine[4:]] = 0
    payload = collect(federation, remaining=remaining)[0].payload
    assert sorted(payload.records) == sorted(mine[:4:2])
    state = State(weights=federation.initial_weights, clients={0: {"kept": torch.ones(1)}})
    nothing, _ = collect(federation, state=state, remaining=np.zeros(48, dtype=np.int64))
    assert nothing.payload is None
    assert nothing.own is None
    assert nothing.client_state is None  # what it kept stays


def test_the_bytes_of_a_payload_are_those_of_its_code(digits):
    """Catches: float bytes counted for lattice integers, and the other way round."""
    federation = make_tiny(digits, privacy=gaussian(placement="exchange"))
    collected, plan = collect(federation)
    code = encode(truncate(collected.payload.activations, spacing=plan.payload_spacing), spacing=plan.payload_spacing)
    assert collected.payload.num_bytes == len(code)
    for privacy in (None, gaussian()):
        payload = collect(make_tiny(digits, privacy=privacy))[0].payload
        assert payload.num_bytes == 8 * 8 * 4


def test_a_private_run_never_sends_clean_activations(digits):
    """Catches: privacy of the updates alone beside a method that shares: activations would leave as they are, uncharged."""
    updates_alone = {"placement": "updates", "updates": "dp-fedavg", "update_multiplier": 4.0}
    federation = make_tiny(digits, privacy=gaussian(**updates_alone))
    with pytest.raises(ValueError, match="activations") as caught:
        collect(federation)
    assert "\n" not in str(caught.value)
