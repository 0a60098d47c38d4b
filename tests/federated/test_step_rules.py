"""Momentum and weight decay against torch.optim.SGD, in every kind of step there is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import gaussian, make_tiny
from quadratic import every_state
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import begin_run, run_rounds
from asfl_privacy.execution.choice import make_executor
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.batched_steps import batch_network, run_steps_batched
from asfl_privacy.federated.local_training import local_steps, own_records
from asfl_privacy.federated.phases import Stage
from asfl_privacy.federated.private_steps import run_private_steps
from asfl_privacy.federated.steps import Pool, Rule, run_steps, take_step
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import read_weights

RULES = [Rule(0.1), Rule(0.1, momentum=0.9), Rule(0.1, weight_decay=0.01), Rule(0.1, momentum=0.9, weight_decay=0.01)]


def make_net(*, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype)


def make_pool(count=40, *, seed=0, dtype=torch.float32):
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Pool(inputs=inputs, labels=torch.arange(count) % 2)


def optimizer_of(net, rule):
    return torch.optim.SGD(net.parameters(), lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)


def sgd(net, pool, rule, *, batches, correction=None):
    """torch.optim.SGD on the mini-batches; the mean of the raw gradients."""
    optimizer, kept = optimizer_of(net, rule), []
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(pool.inputs[batch]), pool.labels[batch]).backward()
        kept.append({name: value.grad.clone() for name, value in net.named_parameters()})
        for name, value in net.named_parameters():
            if correction is not None and name in correction:
                value.grad.add_(correction[name])
        optimizer.step()
    return {name: torch.stack([one[name] for one in kept]).mean(0) for name in kept[0]}


def batches_of(pool, *, num_steps, seed, size=8):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.choice(len(pool.labels), size=size, replace=False)) for _ in range(num_steps)]


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_torchs_sgd_bit_for_bit(rule):
    """Catches dampening, Nesterov's step, a direction that starts at −lr·g, and decay after momentum."""
    net, twin, pool = make_net(), make_net(), make_pool()
    run_steps(net, pool, num_steps=7, batch_size=8, rule=rule, rng=np.random.default_rng(1))
    sgd(twin, pool, rule, batches=batches_of(pool, num_steps=7, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_a_correction_is_added_to_the_gradient_before_all_else_and_the_raw_one_is_kept(rule):
    """Catches a correction after momentum, its sign, and a mean of corrected or decayed gradients."""
    net, twin = make_net(dtype=torch.float64), make_net(dtype=torch.float64)
    pool = make_pool(dtype=torch.float64)
    correction = {"0.weight": torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)}
    taken = run_steps(
        net,
        pool,
        num_steps=7,
        batch_size=8,
        rule=rule,
        rng=np.random.default_rng(1),
        correction=correction,
        keep_gradient=True,
    )
    mean = sgd(twin, pool, rule, batches=batches_of(pool, num_steps=7, seed=1), correction=correction)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert list(taken.mean_gradient) == list(mean)
    assert all(torch.allclose(taken.mean_gradient[name], mean[name], rtol=0.0, atol=1e-14) for name in mean)


@pytest.mark.parametrize("rule", RULES)
def test_batched_steps_are_those_one_by_one(rule):
    """Float64, 1e-12: clients of 40, 8, 5 and 1 records, corrections of all, some or no parameters, mean gradients too.

    Catches one direction for all clients, decay times the number of clients, and means over padded rows.
    """
    pools = [make_pool(count, seed=count, dtype=torch.float64) for count in (40, 8, 5, 1)]
    whole = {name: torch.full_like(value, 0.1) for name, value in make_net(dtype=torch.float64).named_parameters()}
    corrections = [whole, {"2.bias": torch.ones(2, dtype=torch.float64)}, None, {n: -v for n, v in whole.items()}]
    start = read_weights(make_net(dtype=torch.float64))
    starts = [{name: value + 0.1 * i for name, value in start.items()} for i in range(4)]
    after, taken = run_steps_batched(
        batch_network(make_net(dtype=torch.float64)),
        starts,
        pools,
        rngs=[np.random.default_rng(i) for i in range(4)],
        num_steps=6,
        batch_size=8,
        rule=rule,
        corrections=corrections,
        keep_gradient=True,
    )
    for i, pool in enumerate(pools):
        net = make_net(dtype=torch.float64)
        net.load_state_dict(starts[i])
        alone = run_steps(
            net,
            pool,
            num_steps=6,
            batch_size=8,
            rule=rule,
            rng=np.random.default_rng(i),
            correction=corrections[i],
            keep_gradient=True,
        )
        for name, value in net.named_parameters():
            assert torch.allclose(after[i][name], value, rtol=0.0, atol=1e-12), (i, name)
            assert torch.allclose(taken[i].mean_gradient[name], alone.mean_gradient[name], rtol=0.0, atol=1e-12)


def rounds_of_sgd(federation, *, anew):
    """One client's rounds by torch.optim.SGD, whose directions start anew each round or do not."""
    net, data, settings = federation.replica().model, federation.data, federation.settings
    net.load_state_dict(federation.initial_weights)
    optimizer = optimizer_of(net, settings.rule(0))
    holder = federation.clients[0]
    for round in range(settings.rounds):
        if anew:
            optimizer = optimizer_of(net, settings.rule(0))
        rng = numpy_stream(settings.seed, round=round, client=0, purpose="full steps")
        for _ in range(settings.tail_steps + settings.full_steps):
            batch = torch.from_numpy(rng.choice(data.num_records, size=settings.batch_size, replace=False))
            optimizer.zero_grad()
            F.cross_entropy(net(holder.inputs[batch]), holder.labels[batch]).backward()
            optimizer.step()
    return net.state_dict()


def test_momentum_starts_anew_each_round_and_lasts_through_its_steps(digits):
    """One client's FedAvg against torch.optim.SGD, bit for bit; one optimiser over all rounds is the mutant."""
    federation = make_tiny(digits, clients=1, cohort=1, momentum=0.9, weight_decay=1e-3)
    found = every_state(federation, METHODS["fedavg"])[-1].weights
    right, wrong = rounds_of_sgd(federation, anew=True), rounds_of_sgd(federation, anew=False)
    assert all(torch.equal(value, right[name]) for name, value in found.items())
    assert not torch.allclose(found["out.weight"], wrong["out.weight"])


def test_the_tail_round_leaves_the_head_to_no_decay_and_no_direction(digits):
    """Catches decay of parameters that a stage does not train."""
    federation = make_tiny(digits, momentum=0.9, weight_decay=0.1, full_steps=0)
    states = every_state(federation, METHODS["asfl"])
    for name in ("body.1.weight", "body.1.bias"):
        assert torch.equal(states[-1].weights[name], states[0].weights[name])
    assert not torch.equal(states[-1].weights["out.weight"], states[0].weights["out.weight"])


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_what_the_loss_does_not_use_and_what_is_frozen_stay_as_they_are():
    """As torch.optim.SGD leaves a parameter without gradient. Catches decay of both; their mean gradients are 0."""
    net = HalfUsed()
    net.used.bias.requires_grad_(False)
    before = read_weights(net)
    taken = run_steps(
        net,
        make_pool(),
        num_steps=3,
        batch_size=8,
        rule=Rule(0.1, momentum=0.9, weight_decay=0.1),
        rng=np.random.default_rng(0),
        keep_gradient=True,
    )
    still = ("used.bias", "unused.weight", "unused.bias")
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in still)
    assert not torch.equal(net.used.weight, before["used.weight"])
    assert list(taken.mean_gradient) == ["used.weight", "unused.weight", "unused.bias"]
    assert not taken.mean_gradient["unused.weight"].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("corrected", [False, True])
def test_a_step_changes_neither_gradients_nor_corrections(rule, corrected):
    """Catches a direction that is the gradient's own memory, and a sum in place."""
    gradient, correction, directions = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]), {}
    for _ in range(3):
        take_step(
            {"w": torch.ones(2)},
            {"w": gradient},
            rule=rule,
            correction={"w": correction} if corrected else None,
            directions=directions,
        )
    assert gradient.tolist() == [1.0, 2.0]
    assert correction.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("rule", RULES)
def test_dp_sgd_moves_by_torchs_sgd_on_what_was_released_and_nothing_else(rule):
    """Momentum and decay are post-processing of noised sums. Catches directions of gradients before clipping or noise."""
    released, start = [], make_net()

    def add_noise(total):
        noised = total + torch.randn(len(total), generator=torch.Generator().manual_seed(len(released))).double()
        released.append(noised.clone())
        return noised

    net, twin = make_net(), make_net()
    run_private_steps(
        net,
        make_pool(),
        num_steps=5,
        batch_size=8,
        rule=rule,
        rng=np.random.default_rng(0),
        clip=0.5,
        add_noise=add_noise,
    )
    optimizer = optimizer_of(twin, rule)
    assert len(released) == 5
    for noised in released:
        pieces = torch.split(noised / 8, [value.numel() for value in twin.parameters()])
        for value, piece in zip(twin.parameters(), pieces, strict=True):
            value.grad = piece.reshape(value.shape).float()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert not torch.equal(net[0].weight, start[0].weight)


def test_momentum_and_decay_change_no_entry_of_the_ledger(digits):
    """The same seed draws the same records. Catches charges that follow values, and noise scaled by the rule."""
    runs = []
    for changes in ({}, {"momentum": 0.9, "weight_decay": 0.01}):
        privacy = gaussian(updates="dp-sgd", update_multiplier=3.0, update_clip=0.5)
        federation = make_tiny(digits, privacy=privacy, rounds=2, **changes)
        with make_executor("serial", federation, METHODS["asfl"]) as running:
            start = begin_run(federation, ledger=Ledger(p=privacy.p, radius=privacy.radius))
            runs.append(run_rounds(federation, METHODS["asfl"], executor=running, start=start))
    assert runs[0].ledger == runs[1].ledger
    assert runs[0].ledger.counts
    assert not torch.equal(runs[0].state.weights["out.weight"], runs[1].state.weights["out.weight"])


def test_noised_steps_refuse_a_correction_a_kept_gradient_and_another_objective(digits):
    """Catches raw gradients that leave beside noised ones, uncharged."""
    privacy = gaussian(updates="dp-sgd", update_multiplier=3.0, update_clip=0.5)
    federation = make_tiny(digits, privacy=privacy)
    plain = Stage(part="full", pool=own_records(federation, 0), num_steps=1)
    weights = federation.initial_weights
    odd = [
        replace(plain, correction={"out.bias": torch.zeros_like(weights["out.bias"])}),
        replace(plain, keep_gradient=True),
        replace(plain, objective=lambda network, inputs, labels: (network(inputs), torch.zeros(()))),
    ]
    for stage in odd:
        federation.load(weights, training=True)
        with pytest.raises(ValueError, match="dp-sgd noises plain gradients alone"):
            local_steps(federation.model, stage, client=0, federation=federation, remaining=None, round=0)
