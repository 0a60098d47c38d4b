"""Local training as it is charged: what costs nothing, what is noised and by how much, and what leaves."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from federations import all_rows, gaussian, make_federation, make_tiny
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated import METHODS, State
from asfl_privacy.federated.local_training import finish_update, local_steps, trained_network, update_noise
from asfl_privacy.federated.phases import Stage
from asfl_privacy.federated.private_updates import trained_names
from asfl_privacy.federated.sharing import collect_activations, plan_sharing, tail_pool
from asfl_privacy.federated.steps import Pool
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import read_weights
from asfl_privacy.mechanisms.label_randomiser import transition_matrix
from asfl_privacy.mechanisms.lattice import LatticeNoise

DP_SGD = {"updates": "dp-sgd", "update_multiplier": 3.0, "update_clip": 0.5}
DP_FEDAVG = {"updates": "dp-fedavg", "update_multiplier": 3.0, "update_clip": 0.5}


def without_noise(monkeypatch):
    monkeypatch.setattr(LatticeNoise, "release", lambda self, integers, source: integers)


def vector(weights, names):
    return torch.cat([weights[name].double().flatten() for name in names])


def train(federation, method="asfl", *, remaining=None, round=0):
    """Client 0's local steps with client 1's payload, where the method shares."""
    state = State(weights=federation.initial_weights)
    plan = METHODS[method].prepare(state, federation=federation, round=round)
    collected = [
        METHODS[method].collect(state, client, federation=federation, plan=plan, remaining=None, round=round)
        for client in (0, 1)
    ]
    update = METHODS[method].train(
        state,
        0,
        federation=federation,
        plan=plan,
        own=collected[0].own,
        received=collected[1].payload,
        remaining=remaining,
        round=round,
    )
    return update, collected


def draws_by_hand(num_rows, num_own, *, purpose, num_steps, batch_size=8):
    """How often each own row enters a mini-batch, from the stream alone."""
    rng, counts = numpy_stream(0, round=0, client=0, purpose=purpose), np.zeros(num_own, dtype=int)
    for _ in range(num_steps):
        drawn = rng.choice(num_rows, size=min(batch_size, num_rows), replace=False)
        counts[drawn[drawn < num_own]] += 1
    return counts


def test_the_noise_of_updates_is_that_of_twice_the_clip():
    """Catches: σ = z·C (add or remove one), a scale rounded down, a lattice as coarse as the noise."""
    for z, clip in ((3.0, 0.5), (1 / 3, 0.7), (12.34567, 1.0), (1e4, 1e-3)):
        noise = update_noise(gaussian(updates="dp-sgd", update_multiplier=z, update_clip=clip))
        due = Fraction(z) * 2 * Fraction(clip)
        assert due <= Fraction(noise.scale) <= due * (1 + Fraction(1, 2**9)) * (1 + Fraction(1, 2**50))
        assert noise.noise_multiplier >= z
        assert noise.sensitivity == 2.0 * clip
        assert 2**24 <= noise.scale / noise.spacing <= 2**27


def test_a_private_step_is_the_clean_one_plus_lr_sigma_over_the_batch(digits, monkeypatch):
    """σ = z·2C = 3 on the sum, so lr·3/8 on every weight. Catches: C for 2C, noise on the mean, a layer left out."""
    federation = make_federation(
        digits,
        clients=2,
        cohort=2,
        partition="iid",
        batch_size=8,
        tail_steps=0,
        full_steps=1,
        privacy=gaussian(**DP_SGD),
    )
    names = trained_names(federation.model)
    noised, _ = train(federation, "fedavg")
    without_noise(monkeypatch)
    clean, _ = train(federation, "fedavg")
    moved = vector(noised.weights, names) - vector(clean.weights, names)
    for name in names:
        part = (noised.weights[name] - clean.weights[name]).double()
        assert bool((part != 0).double().mean() > 0.99), name
    assert moved.std().item() == pytest.approx(0.1 * 3.0 / 8, rel=6 / math.sqrt(2 * len(moved)))
    # without noise: the mean of 8 gradients of norm at most C
    step = vector(clean.weights, names) - vector(federation.initial_weights, names)
    assert 0.0 < float(step.norm()) <= 0.1 * 0.5 * (1 + 1e-6)


def test_full_steps_charge_every_draw_of_every_record(digits):
    """Catches: one charge a round, the records of another client, positions for records, the wrong channel."""
    federation = make_tiny(digits, tail_steps=0, full_steps=5, privacy=gaussian(**DP_SGD))
    update, _ = train(federation)
    (charged,) = update.charges
    counts = draws_by_hand(24, 24, purpose="full steps", num_steps=5)
    assert np.array_equal(charged.records, np.repeat(federation.clients[0].records, counts))
    assert len(charged.records) == 5 * 8
    noise = update_noise(federation.privacy)
    assert (charged.channel, charged.mechanism, charged.once) == ("updates", "gaussian", False)
    assert charged.noise_multiplier == charged.whole_record_multiplier == 3.0 <= noise.noise_multiplier
    assert charged.client_multiplier is None
    num_parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert charged.epsilon_excess == noise.epsilon_excess(num_parameters)
    assert charged.tail_probability == noise.tail_probability(num_parameters)
    assert charged.sampler == "seeded"


def test_tail_steps_on_clean_activations_are_charged_and_on_released_ones_cost_nothing(digits):
    """Catches: raw activations trained on for free, remote rows charged to the receiver, released ones paid twice."""
    sizes = {"tail_steps": 4, "full_steps": 0}
    clean = make_tiny(digits, **sizes, privacy=gaussian(label_epsilon=1.0, **DP_SGD))
    update, collected = train(clean)
    (charged,) = update.charges
    counts = draws_by_hand(32, 16, purpose="tail steps", num_steps=4)
    assert 0 < counts.sum() < 4 * 8
    assert np.array_equal(charged.records, np.repeat(collected[0].payload.records, counts))
    assert charged.epsilon_excess == update_noise(clean.privacy).epsilon_excess(8 * 10 + 10)  # the tail's parameters
    released = make_tiny(digits, **sizes, privacy=gaussian(label_epsilon=1.0, own="released", **DP_SGD))
    free, shared = train(released)
    assert free.charges == ()
    plain = make_tiny(digits, **sizes, privacy=gaussian(label_epsilon=1.0, own="released"))
    twin, _ = train(plain)
    assert all(torch.equal(value, twin.weights[name]) for name, value in free.weights.items())
    # not even the sender's own raw records: others in their place change nothing
    other = replace(
        released,
        clients=tuple(replace(c, inputs=1.0 - c.inputs, labels=(c.labels + 1) % 10) for c in released.clients),
    )
    again = METHODS["asfl"].train(
        State(weights=other.initial_weights),
        0,
        federation=other,
        plan=None,
        own=shared[0].own,
        received=shared[1].payload,
        remaining=None,
        round=0,
    )
    assert all(torch.equal(value, again.weights[name]) for name, value in free.weights.items())


@pytest.mark.parametrize("updates", [{}, {"updates": "dp-sgd", "update_multiplier": 1e-3, "update_clip": 50.0}])
def test_the_tails_loss_is_corrected_on_noisy_rows_alone(digits, monkeypatch, updates):
    """−log Σ_x T[x, y]·p(x) on the partner's rows, −log p(y) on own clean ones, written out.

    Catches: no correction, correction of own clean rows, T transposed or of another ε, DP-SGD without it.
    """
    federation = make_tiny(digits, tail_steps=3, full_steps=0, privacy=gaussian(label_epsilon=2.0, **updates))
    without_noise(monkeypatch)  # of updates and activations; labels stay randomised
    update, collected = train(federation)
    pool = tail_pool(collected[0].own, collected[1].payload)
    assert not torch.equal(collected[1].payload.labels.long(), federation.clients[1].labels[:16])
    T = transition_matrix(10, epsilon=2.0)
    federation.load(federation.initial_weights, training=True)
    tail, rng = federation.split.tail, numpy_stream(0, round=0, client=0, purpose="tail steps")
    for _ in range(3):
        batch = rng.choice(len(pool.labels), size=8, replace=False)
        loss = torch.zeros((), dtype=torch.float64)
        for row in batch:
            p = F.softmax(tail(all_rows(pool)[row : row + 1]).double(), dim=1)[0]
            y = int(pool.labels[row])
            likelihood = p[y] if row < pool.num_own else sum(T[x, y] * p[x] for x in range(10))
            loss = loss - torch.log(likelihood) / 8
        gradients = torch.autograd.grad(loss, list(tail.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(tail.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    for name, value in read_weights(federation.model).items():
        assert torch.allclose(value, update.weights[name], atol=1e-6), name


def test_a_record_past_its_allowance_enters_no_noised_step_and_training_goes_on(digits, monkeypatch):
    """Catches: an allowance per round for each of tail and full steps apart, and a step that is left out."""
    federation = make_tiny(digits, tail_steps=6, full_steps=6, privacy=gaussian(**DP_SGD))
    remaining = np.full(48, 2, dtype=np.int64)
    spent = federation.clients[0].records[0]
    remaining[spent] = 0
    before = remaining.copy()
    update, _ = train(federation, remaining=remaining)
    named = np.concatenate([charged.records for charged in update.charges])
    counts = np.bincount(named, minlength=48)
    assert counts.max() == 2
    assert counts[spent] == 0
    assert np.array_equal(remaining, before)  # the executor's own view is left as it was
    assert update.drawn == 12 * 8
    # nobody is left: noise alone moves the network, and nobody is charged
    empty, _ = train(federation, remaining=np.zeros(48, dtype=np.int64))
    assert empty.charges == ()
    assert not torch.equal(empty.weights["out.weight"], federation.initial_weights["out.weight"])
    without_noise(monkeypatch)
    alone = make_tiny(digits, tail_steps=0, full_steps=6, privacy=gaussian(**DP_SGD))  # no remote rows
    still, _ = train(alone, remaining=np.zeros(48, dtype=np.int64))
    names = trained_names(federation.model)
    assert torch.equal(vector(still.weights, names), vector(federation.initial_weights, names))


def test_an_update_leaves_clipped_and_noised_and_charges_all_records_of_the_client(digits, monkeypatch):
    """σ = z·2C = 3 on each weight once. Catches: no clip, noise a step, C for 2C, the drawn records alone charged."""
    federation = make_federation(digits, clients=2, cohort=2, partition="iid", lr=0.5, privacy=gaussian(**DP_FEDAVG))
    update, _ = train(federation, "fedavg")
    names = trained_names(federation.model)
    without_noise(monkeypatch)
    clipped, _ = train(federation, "fedavg")
    raw, _ = train(replace(federation, privacy=gaussian()), "fedavg")
    old = vector(federation.initial_weights, names)
    change, free = vector(clipped.weights, names) - old, vector(raw.weights, names) - old
    assert float(free.norm()) > 1.0
    assert 0.49 < float(change.norm()) <= 0.5 * (1 + 1e-5)  # rounding to float32 is post-processing
    assert float(F.cosine_similarity(change, free, dim=0)) > 0.9999
    noise = vector(update.weights, names) - vector(clipped.weights, names)
    assert noise.std().item() == pytest.approx(3.0, rel=6 / math.sqrt(2 * len(noise)))
    (charged,) = update.charges
    assert np.array_equal(charged.records, federation.clients[0].records)
    assert charged.noise_multiplier == charged.whole_record_multiplier == charged.client_multiplier == 3.0
    assert charged.channel == "updates"
    assert charged.epsilon_excess == update_noise(federation.privacy).epsilon_excess(len(old))
    untouched = set(federation.initial_weights) - set(names)
    assert untouched
    assert all(torch.equal(update.weights[name], federation.initial_weights[name]) for name in untouched)


def test_a_client_with_a_spent_record_sends_what_it_received(digits):
    """Catches: an update of the other records, which still depends on the spent one; another client's budget asked."""
    federation = make_tiny(digits, privacy=gaussian(**DP_FEDAVG))
    remaining = np.ones(48, dtype=np.int64)
    remaining[federation.clients[1].records] = 0
    assert len(train(federation, remaining=remaining)[0].charges) == 1
    remaining[federation.clients[0].records[-1]] = 0
    update, _ = train(federation, remaining=remaining)
    assert update.charges == ()
    assert all(torch.equal(value, federation.initial_weights[name]) for name, value in update.weights.items())
    assert update.num_records == 24


@pytest.mark.parametrize("updates", [DP_SGD, DP_FEDAVG])
def test_update_noise_repeats_with_the_seed_and_not_with_the_systems_source(digits, updates):
    """Catches: one stream for tail and full steps, clients or rounds; a seed behind `reproducible=False`."""
    seeded = make_tiny(digits, privacy=gaussian(**updates))
    first, again, later = train(seeded)[0], train(seeded)[0], train(seeded, round=1)[0]
    assert all(torch.equal(value, again.weights[name]) for name, value in first.weights.items())
    assert not torch.equal(first.weights["out.weight"], later.weights["out.weight"])
    system = make_tiny(digits, privacy=gaussian(reproducible=False, **updates))
    one, two = train(system)[0], train(system)[0]
    assert not torch.equal(one.weights["out.weight"], two.weights["out.weight"])
    assert {charged.sampler for charged in one.charges} == {"lattice"}


def test_updates_in_the_clear_are_the_networks_weights_and_charge_nothing(digits):
    federation = make_tiny(digits, privacy=gaussian())
    federation.load(federation.initial_weights, training=True)
    holder = federation.clients[0]
    pool = Pool(inputs=holder.inputs, labels=holder.labels, records=holder.records)
    done = local_steps(
        federation.model,
        Stage(part="full", pool=pool, num_steps=2),
        client=0,
        federation=federation,
        remaining=None,
        round=0,
    )
    weights, state = read_weights(federation.model), State(weights=federation.initial_weights)
    update = finish_update(weights, state, 0, federation=federation, steps=(done,), remaining=None, round=0)
    assert (done.charges, update.charges) == ((), ())
    assert all(torch.equal(value, update.weights[name]) for name, value in federation.model.state_dict().items())


@pytest.mark.parametrize("placement", ["input", "exchange"])
def test_pixeldps_training_has_the_noise_of_the_plan_in_its_head(digits, placement):
    """Catches: noise elsewhere or of another scale, and noise in training where it was not asked."""
    federation = make_tiny(digits, privacy=gaussian(placement=placement, noisy_training=True))
    state = State(weights=federation.initial_weights)
    plan = plan_sharing(state, federation=federation)
    federation.load(state.weights, training=True)
    noisy = trained_network(federation, plan, client=0, round=0)
    x = federation.clients[0].inputs.repeat(50, 1, 1, 1)
    with torch.no_grad():
        federation.split.head.train(True)
        clean = x if placement == "input" else federation.split.head(x)
        at_noise = noisy.head[0](x) if placement == "input" else noisy.head(x)
    assert (at_noise - clean).std().item() == pytest.approx(plan.noise_stddev, rel=0.05)
    assert {id(p) for p in noisy.parameters()} == {id(p) for p in federation.model.parameters()}
    quiet = make_tiny(digits, privacy=gaussian(placement=placement))
    assert trained_network(quiet, plan, client=0, round=0) is quiet.model
    assert trained_network(federation, None, client=0, round=0) is federation.model


def test_collected_activations_hold_what_training_needs(digits):
    """The pool of the tail keeps the own rows' records, so that they can be charged; remote rows have none."""
    federation = make_tiny(digits, privacy=gaussian(**DP_SGD))
    state = State(weights=federation.initial_weights)
    plan = plan_sharing(state, federation=federation)
    own, partner = (collect_activations(state, client, federation=federation, plan=plan, round=0) for client in (0, 1))
    pool = tail_pool(own.own, partner.payload)
    assert np.array_equal(pool.records, own.payload.records)
    assert len(pool.records) == pool.num_own == len(pool.labels) // 2


class Keeping(nn.Module):
    """Keeps the inputs of training steps beside its parameters, and adds them to what it gives while evaluating."""

    def __init__(self, *, as_buffer):
        super().__init__()
        self.as_buffer = as_buffer
        self.register_buffer("kept_buffer", torch.zeros(1), persistent=False)
        self.kept = torch.zeros(1)

    def forward(self, x):
        if self.training:
            if self.as_buffer:
                self.kept_buffer = x.detach().mean(0, keepdim=True)
            else:
                self.kept = x.detach().mean(0, keepdim=True)
            return x
        return x + self.kept + self.kept_buffer


@pytest.mark.parametrize("as_buffer", [True, False])
def test_what_a_block_keeps_in_training_does_not_outlive_the_steps(digits, as_buffer):
    """A raw record kept in train mode would leave with the next payload, uncharged. Catches steps on the network itself."""
    federation = make_federation(digits, privacy=gaussian())
    federation.split.head.add_module("keeping", Keeping(as_buffer=as_buffer))
    keeping = federation.split.head.keeping
    pool = Pool(inputs=digits.train_inputs[:32], labels=digits.train_labels[:32])
    network = nn.Sequential(federation.split.head, federation.split.tail).train()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    stage = Stage(part="full", pool=pool, num_steps=2)
    local_steps(network, stage, client=0, federation=federation, remaining=None, round=0)
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert torch.equal(keeping.kept, torch.zeros(1))
    assert torch.equal(keeping.kept_buffer, torch.zeros(1))
