"""ASFL written out a second time, as Algorithms 1 and 2 read, against the phases."""

import math

import torch
from federations import make_federation
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.execution import run_serially
from asfl_privacy.federated import METHODS
from asfl_privacy.federated.pairing import draw_pairing
from asfl_privacy.federated.streams import SERVER, numpy_stream

SETTINGS = {"clients": 4, "cohort": 4, "rounds": 2, "tail_steps": 3, "full_steps": 2, "batch_size": 8, "lr": 0.2}


def descend(parameters, loss, lr):
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)


def asfl_by_hand(federation, data):
    """Line by line; shares only the random streams and the network's blocks with the product."""
    net, lr, batch_size = federation.model, SETTINGS["lr"], SETTINGS["batch_size"]
    head, tail = net[:3], net[3:]  # normalize, conv1, conv2 | fc1, classifier
    world = {name: value.clone() for name, value in federation.initial_weights.items()}
    for round in range(SETTINGS["rounds"]):
        net.load_state_dict(world)
        latent = {}
        for client in federation.clients:  # Algorithm 1, line 3: I_i
            rng = numpy_stream(0, round=round, client=client.number, purpose="share")
            wanted = math.ceil(SETTINGS["tail_steps"] / 2) * batch_size
            drawn = rng.choice(len(client.records), size=min(wanted, len(client.records)), replace=False)
            records = client.records[drawn]
            with torch.no_grad():
                latent[client.number] = head(data.train_inputs[records]), data.train_labels[records]
        receiver_of = draw_pairing(range(4), rng=numpy_stream(0, round=round, client=SERVER, purpose="pairing"))
        sender_to = {receiver: sender for sender, receiver in receiver_of.items()}
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in world.items()}
        for client in federation.clients:
            net.load_state_dict(world)
            mine, theirs = latent[client.number], latent[sender_to[client.number]]
            inputs, labels = torch.cat([mine[0], theirs[0]]), torch.cat([mine[1], theirs[1]])
            rng = numpy_stream(0, round=round, client=client.number, purpose="tail steps")
            for _ in range(SETTINGS["tail_steps"]):  # lines 5 and 6
                batch = rng.choice(len(labels), size=batch_size, replace=False)
                descend(list(tail.parameters()), F.cross_entropy(tail(inputs[batch]), labels[batch]), lr)
            rng = numpy_stream(0, round=round, client=client.number, purpose="full steps")
            for _ in range(SETTINGS["full_steps"]):  # Algorithm 2
                batch = client.records[rng.choice(len(client.records), size=batch_size, replace=False)]
                loss = F.cross_entropy(net(data.train_inputs[batch]), data.train_labels[batch])
                descend(list(net.parameters()), loss, lr)
            for name, value in net.state_dict().items():
                total[name] += value.double() * len(client.records) / len(data.train_labels)
        world = {name: value.to(world[name].dtype) for name, value in total.items()}
    return world


def test_the_phases_are_algorithms_1_and_2(digits):
    """Catches an unweighted mean, full steps before the tail, one pairing for all rounds, another lr in the tail, a tail
    that shares the stream of full steps, a head other than the round's global one."""
    federation = make_federation(digits, partition="dirichlet:1", **SETTINGS)
    assert len({client.num_records for client in federation.clients}) > 1
    result = run_serially(federation, METHODS["asfl"], ledger=None)
    expected = asfl_by_hand(make_federation(digits, partition="dirichlet:1", **SETTINGS), digits)
    for name, value in expected.items():
        assert torch.allclose(result.state.weights[name], value, atol=1e-6, rtol=1e-5), name
