"""SplitFed V1 against a split loop written out by hand, FedAvg, and the formula of its bytes."""

import dataclasses
import math
from collections import OrderedDict

import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import gaussian, make_federation, make_tiny
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import begin_run, run_rounds, run_serially
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.methods.splitfed import SplitFedV1
from asfl_privacy.federated.methods.splitfed_v2 import SplitFedV2
from asfl_privacy.federated.streams import numpy_stream, torch_seed
from asfl_privacy.federated.weights import read_weights
from asfl_privacy.models import split_model

V1, V2 = SplitFedV1(), SplitFedV2()
TINY_NORM = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "dirichlet:1"}
RULES = [{"momentum": 0.0, "weight_decay": 0.0}, {"momentum": 0.9, "weight_decay": 0.01}]


def split_by_hand(federation):
    """Two networks, two optimizers a client, and a gradient that is handed back; means of all, buffers too."""
    settings = federation.settings
    names = list(federation.initial_weights)
    head, tail = federation.split.head, federation.split.tail
    world = {name: value.clone() for name, value in federation.initial_weights.items()}
    for round in range(settings.rounds):
        results, counts = [], []
        for client in sample_cohort(federation, round=round):
            head.load_state_dict({name: world[name] for name in head.state_dict()})
            tail.load_state_dict({name: world[name] for name in tail.state_dict()})
            rule = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
            client_side = torch.optim.SGD(head.parameters(), **rule)
            server_side = torch.optim.SGD(tail.parameters(), **rule)
            holder = federation.clients[client]
            rng = numpy_stream(settings.seed, round=round, client=client, purpose="full steps")
            torch.manual_seed(torch_seed(settings.seed, round=round, client=client, purpose="layers"))
            for _ in range(settings.tail_steps + settings.full_steps):
                size = min(settings.batch_size, holder.num_records)
                batch = torch.from_numpy(rng.choice(holder.num_records, size=size, replace=False))
                sent = head(holder.inputs[batch])
                arrived = sent.detach().clone().requires_grad_()
                server_side.zero_grad()
                F.cross_entropy(tail(arrived), holder.labels[batch]).backward()
                server_side.step()
                client_side.zero_grad()
                sent.backward(arrived.grad.clone())
                client_side.step()
            both = {**head.state_dict(), **tail.state_dict()}
            results.append({name: both[name].clone() for name in names})
            counts.append(holder.num_records)
        for name in names:
            mean = sum(one[name].double() * count for one, count in zip(results, counts, strict=True)) / sum(counts)
            world[name] = (mean if world[name].is_floating_point() else mean.round()).to(world[name].dtype)
    return world


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("network", [{}, TINY_NORM])
def test_v1_is_two_halves_with_an_optimizer_each(digits, network, rule):
    """Catches an unweighted mean, halves that are one object for all clients, buffers forgotten, and with momentum a new
    optimizer for each batch."""
    settings = {"lr": 0.05, **network, **rule}
    run = run_serially(make_federation(digits, **settings), V1, ledger=None)
    federation = make_federation(digits, **settings)
    assert len({client.num_records for client in federation.clients}) > 1
    assert all(module.training for module in federation.split.tail.modules())
    for name, value in split_by_hand(federation).items():
        assert torch.allclose(run.state.weights[name], value, atol=1e-6, rtol=1e-5), name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_v1_is_fedavg_and_after_sharing_asfl_to_the_bit(digits, shared, rule):
    method, plain = (V1.sharing(), METHODS["asfl"]) if shared else (V1, METHODS["fedavg"])
    first, second = (run_serially(make_federation(digits, cohort=5, **rule), m, ledger=None) for m in (method, plain))
    assert_same_tensors(first.state.weights, second.state.weights)
    assert (first.drawn, first.drawn_remote) == (second.drawn, second.drawn_remote)
    assert [e.accuracy for e in first.evaluations] == [e.accuracy for e in second.evaluations]
    assert first.traffic.model < second.traffic.model


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_v1_is_the_same_run_on_every_executor(digits, executor):
    workers = 1 if executor == "processes" else 2
    assert_same_run(a_run(make_tiny(digits), V1, "serial"), a_run(make_tiny(digits), V1, executor, workers=workers))


def test_v1_cut_in_two_is_the_whole_run(digits):
    federation, states = make_tiny(digits), []
    start = begin_run(federation, ledger=None)
    with make_executor("serial", federation, V1) as executor:
        whole = run_rounds(federation, V1, executor=executor, start=start, after_round=states.append)
    federation = make_tiny(digits)
    with make_executor("serial", federation, V1) as executor:
        assert_same_run(whole, run_rounds(federation, V1, executor=executor, start=states[0]))


def a_run(federation, method, executor, *, workers=2, **options):
    with make_executor(executor, federation, method, workers=workers, **options) as running:
        return run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=None))


# tiny_net: head 64·8 + 8 numbers of 4 bytes, activation 8 numbers of 4 bytes, label of 10 classes 1 byte.
P_HEAD, ACTIVATION, LABEL = 4 * (64 * 8 + 8), 4 * 8, 1


@pytest.mark.parametrize("method", [V1, V2])
@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.1"])
def test_bytes_are_those_of_the_formula(digits, method, partition):
    """2·P_head + steps·batch·(2·activation + label), a batch no larger than the client; catches P in place of P_head,
    one way of two, labels of eight bytes, and the asked batch size for a small client."""
    federation = make_tiny(digits, clients=6, cohort=4, batch_size=6, partition=partition, tail_steps=2, full_steps=3)
    run = run_serially(federation, method, ledger=None)
    rows = 0
    for round in range(3):
        sizes = [federation.clients[client].num_records for client in sample_cohort(federation, round=round)]
        rows += sum(5 * min(6, size) for size in sizes)
    assert partition == "iid" or rows < 3 * 4 * 5 * 6
    assert run.drawn == rows
    assert run.traffic.model == 3 * 4 * 2 * P_HEAD
    assert run.traffic.activations == rows * 2 * ACTIVATION
    assert run.traffic.labels == rows * LABEL


@pytest.mark.parametrize("cohort", [1, 2, 3])
def test_payloads_are_counted_beside_the_steps(digits, cohort):
    """⌈3/2⌉·8 records each, once whether or not there is a partner; catches τ' + τ full steps after a tail round."""
    federation = make_tiny(digits, clients=3, cohort=cohort, rounds=1, tail_steps=3, full_steps=2)
    run = run_serially(federation, V1.sharing(), ledger=None)
    payload, rows = math.ceil(3 / 2) * 8, 2 * 8
    assert all(client.num_records >= payload for client in federation.clients)
    assert run.traffic.activations == cohort * (payload * ACTIVATION + rows * 2 * ACTIVATION)
    assert run.traffic.labels == cohort * (payload + rows) * LABEL
    assert run.traffic.model == cohort * 2 * P_HEAD


def test_bytes_follow_the_types_that_are_computed_and_sent_in(digits):
    """bfloat16 activations have two bytes; labels of 300 classes four."""
    federation = make_tiny(digits, precision="bfloat16")
    federation = dataclasses.replace(federation, data=dataclasses.replace(federation.data, num_classes=300))
    rows = 2 * 4 * 8
    traffic = V1.traffic(State(weights=federation.initial_weights), (0, 1), (), federation=federation)
    assert (traffic.activations, traffic.labels) == (rows * 2 * 2 * 8, rows * 4)


def test_counting_bytes_leaves_generators_and_the_network_alone(digits):
    federation = make_federation(digits, **TINY_NORM)
    federation.load(federation.initial_weights, training=True)
    before, modes = torch.get_rng_state(), [module.training for module in federation.model.modules()]
    V1.traffic(State(weights=federation.initial_weights), (0, 1), (), federation=federation)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in federation.model.modules()] == modes
    assert all(torch.equal(v, federation.initial_weights[n]) for n, v in federation.model.state_dict().items())


@pytest.mark.parametrize(
    "privacy", [gaussian(), gaussian(placement="updates", updates="dp-fedavg", update_multiplier=4.0)]
)
@pytest.mark.parametrize("method", [V1, V2, V1.sharing()])
@pytest.mark.parametrize("executor", ["serial", "batched"])
def test_a_private_run_is_refused_before_anything_leaves(digits, executor, method, privacy):
    """Catches a run whose ledger would say ε while every step's activations go out as they are."""
    federation, ledger = make_tiny(digits, privacy=privacy), Ledger(p=2.0, radius=1.0)
    with (
        pytest.raises(
            ValueError, match=rf"method {method.name.replace('+', '.')} in a private run .*which no ledger counts"
        ),
        make_executor(executor, federation, method) as running,
    ):
        run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=ledger))
    assert ledger == Ledger(p=2.0, radius=1.0)
    assert method.exposes_records
    assert "activations" in method.in_the_clear


@pytest.mark.parametrize("method", [V1, V2])
@pytest.mark.parametrize("tie", ["one parameter", "one memory", None])
def test_halves_that_share_a_tensor_are_refused(digits, method, tie):
    """Catches a V1 that would not be FedAvg, as the tied tensor trains in two places."""
    federation = square_net(digits, tie=tie)
    if tie is None:
        assert run_serially(federation, method, ledger=None).rounds_done == 3
        return
    line = (
        "round 0: second.weight of the tail and first.1.weight of the head are one tensor: .*choose an exchange layer"
    )
    with pytest.raises(ValueError, match=line):
        run_serially(federation, method, ledger=None)


def square_net(data, *, tie):
    """Two square layers, one on either side of the cut."""
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    if tie == "one parameter":
        second.weight = first.weight
    if tie == "one memory":
        second.weight = nn.Parameter(first.weight.data.t())
    blocks = {"first": nn.Sequential(nn.Flatten(), first), "second": second, "out": nn.Linear(64, 10)}
    model = nn.Sequential(OrderedDict(blocks))
    return dataclasses.replace(
        make_tiny(data), model=model, split=split_model(model, "first"), initial_weights=read_weights(model)
    )


def test_auto_finds_an_executor_for_both(digits):
    for method in (V1, V2):
        federation = make_tiny(digits)
        a_run(federation, method, choose_executor("auto", federation, method, workers=2).name)
