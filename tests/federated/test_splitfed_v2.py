"""SplitFed V2 against a split loop written out by hand, the mistakes of public code, FedAvg, and every executor."""

import dataclasses

import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import make_federation, make_tiny
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.execution import begin_run, run_rounds, run_serially
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.methods.splitfed_v2 import SplitFedV2
from asfl_privacy.federated.steps import evaluate_batch
from asfl_privacy.federated.streams import SERVER, numpy_stream, torch_seed

V2 = SplitFedV2()
NORM = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head", "partition": "dirichlet:1"}
PLAIN, MOMENTUM = {"lr": 0.1}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def split_by_hand(federation, *, mistake=None):
    """Client half, server half, gradient back; one server half for all clients. `mistake` plants one of public code."""
    settings, head, tail = federation.settings, federation.split.head, federation.split.tail
    rule = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    global_head = {name: value.clone() for name, value in head.state_dict().items()}
    first_tail = {name: value.clone() for name, value in tail.state_dict().items()}
    for round in range(settings.rounds):
        cohort = sample_cohort(federation, round=round)
        rng = numpy_stream(settings.seed, round=round, client=SERVER, purpose="splitfed order")
        order = [client for client in rng.permutation(settings.clients).tolist() if client in cohort]
        if mistake == "ascending order":
            order = sorted(order)
        start_of_round = {name: value.clone() for name, value in tail.state_dict().items()}
        heads, counts, tails = [], [], []
        for client in order:
            if mistake != "aliased heads":
                head.load_state_dict(global_head)
            if mistake == "a tail of each client's own":
                tail.load_state_dict(start_of_round)
            holder = federation.clients[client]
            client_side, server_side = (torch.optim.SGD(half.parameters(), **rule) for half in (head, tail))
            draws = numpy_stream(settings.seed, round=round, client=client, purpose="full steps")
            torch.manual_seed(torch_seed(settings.seed, round=round, client=client, purpose="layers"))
            for _ in range(settings.tail_steps + settings.full_steps):
                if mistake == "a new optimizer per batch":
                    client_side, server_side = (torch.optim.SGD(half.parameters(), **rule) for half in (head, tail))
                size = min(settings.batch_size, holder.num_records)
                batch = torch.from_numpy(draws.choice(holder.num_records, size=size, replace=False))
                sent = head(holder.inputs[batch])
                arrived = sent.detach().clone().requires_grad_()
                server_side.zero_grad()
                F.cross_entropy(tail(arrived), holder.labels[batch]).backward()
                server_side.step()
                client_side.zero_grad()
                sent.backward(arrived.grad.clone())
                client_side.step()
            heads.append({name: value.clone() for name, value in head.state_dict().items()})
            tails.append({name: value.clone() for name, value in tail.state_dict().items()})
            counts.append(1 if mistake == "an unweighted mean" else holder.num_records)
        global_head = mean_of(heads, counts)
        if mistake == "tails averaged":
            tail.load_state_dict(mean_of(tails, counts))
    if mistake == "a stale head at test time":
        global_head = heads[-1]
    return {**global_head, **(first_tail if mistake == "a stale tail at test time" else tail.state_dict())}


def mean_of(results, counts):
    means = {}
    for name, value in results[0].items():
        total = sum(one[name].double() * count for one, count in zip(results, counts, strict=True))
        means[name] = (total / sum(counts)).to(value.dtype)
    return means


def distance(first, second):
    """Largest difference of an entry, relative to the norm of the tensor."""
    return max(
        float((value.double() - second[name].double()).norm() / (1e-6 + value.double().norm()))
        for name, value in first.items()
    )


@pytest.mark.parametrize("rule", [PLAIN, MOMENTUM])
@pytest.mark.parametrize("network", [{}, NORM])
def test_v2_is_client_halves_against_one_server_half(digits, network, rule):
    """Three rounds, unequal clients, four of six a round; batch norm of the tail as the last client left it."""
    settings = network | rule
    run = run_serially(make_federation(digits, **settings), V2, ledger=None)
    assert distance(split_by_hand(make_federation(digits, **settings)), run.state.weights) < 1e-5


@pytest.mark.parametrize(
    "mistake",
    [
        "ascending order",
        "aliased heads",
        "a tail of each client's own",
        "a new optimizer per batch",
        "an unweighted mean",
        "tails averaged",
        "a stale head at test time",
        "a stale tail at test time",
    ],
)
def test_each_mistake_of_public_code_is_told_apart(digits, mistake):
    """A hundred times further off than the right loop: the comparison above sees each of these mutations."""
    run = run_serially(make_federation(digits, **MOMENTUM), V2, ledger=None)
    assert distance(split_by_hand(make_federation(digits, **MOMENTUM), mistake=mistake), run.state.weights) > 1e-3


def test_evaluation_sees_the_mean_head_and_the_last_tail(digits):
    """Catches halves of the round before, or of a client, at test time."""
    federation = make_federation(digits)
    run = run_serially(federation, V2, ledger=None)
    expected = split_by_hand(make_federation(digits))
    federation.load({name: expected[name] for name in run.state.weights}, training=False)
    right, loss = evaluate_batch(federation.model, inputs=digits.test_inputs, labels=digits.test_labels)
    last = run.evaluations[-1]
    assert last.loss == pytest.approx(loss / len(digits.test_labels), rel=1e-4)
    assert last.accuracy == pytest.approx(right / len(digits.test_labels), abs=1.5 / len(digits.test_labels))


@pytest.mark.parametrize("rule", [PLAIN, MOMENTUM])
@pytest.mark.parametrize("network", [{}, NORM])
@pytest.mark.parametrize("sizes", [{"clients": 1, "cohort": 1, "partition": "iid"}, {"cohort": 1}])
def test_with_one_client_a_round_v2_is_fedavg_to_the_bit(digits, sizes, network, rule):
    """Catches other mini-batches, dropout that is not seeded as in training, and a server half left out of the state."""
    first, second = (
        run_serially(make_federation(digits, **{**network, **rule, **sizes}), method, ledger=None)
        for method in (V2, METHODS["fedavg"])
    )
    assert_same_tensors(first.state.weights, second.state.weights)
    assert (first.drawn, first.drawn_remote) == (second.drawn, 0)
    assert [e.accuracy for e in first.evaluations] == [e.accuracy for e in second.evaluations]


def a_run(federation, method, executor, *, workers=2, **options):
    with make_executor(executor, federation, method, workers=workers, **options) as running:
        return run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=None))


@pytest.mark.parametrize("executor", ["threads", "batched", "auto"])
def test_every_executor_gives_the_same_bits(digits, executor):
    """Catches steps that are taken where clients train, so that each begins with its own copy of the tail."""
    serial, federation = a_run(make_federation(digits, cohort=5), V2, "serial"), make_federation(digits, cohort=5)
    name = choose_executor(executor, federation, V2, workers=3).name
    assert_same_run(serial, a_run(federation, V2, name, workers=3))


def test_processes_give_the_same_bits_with_dropout_and_batch_norm(digits):
    """Catches layers that draw from whatever state torch's generator is in where the clients' turns are taken."""
    settings = {**NORM, "cohort": 5, "rounds": 2}
    serial = a_run(make_federation(digits, **settings), V2, "serial")
    torch.manual_seed(5)
    assert_same_run(serial, a_run(make_federation(digits, **settings), V2, "processes"))


def test_a_turn_leaves_torchs_generator_and_kernels_as_they_were(digits, monkeypatch):
    before, cudnn = torch.get_rng_state(), torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", False)
    monkeypatch.setattr(cudnn, "benchmark", True)
    run_serially(make_federation(digits, **NORM, rounds=1), V2, ledger=None)
    assert torch.equal(torch.get_rng_state(), before)
    assert (cudnn.deterministic, cudnn.benchmark) == (False, True)


def test_a_run_cut_in_two_is_the_whole_run(digits):
    """Catches a server half, or an order, that lives outside the state."""
    federation, states = make_federation(digits), []
    start = begin_run(federation, ledger=None)
    with make_executor("serial", federation, V2) as executor:
        whole = run_rounds(federation, V2, executor=executor, start=start, after_round=states.append)
    federation = make_federation(digits)
    with make_executor("serial", federation, V2) as executor:
        assert_same_run(whole, run_rounds(federation, V2, executor=executor, start=states[0]))


def aggregated(federation, clients, *, round=0):
    state = State(weights=federation.initial_weights)
    phase = {"federation": federation, "round": round}
    updates = {
        client: V2.train(state, client, plan=None, own=None, received=None, remaining=None, **phase)
        for client in clients
    }
    return V2.aggregate(state, updates, **phase)


def test_the_answers_order_does_not_matter(digits):
    """Catches turns in the order in which answers came."""
    federation = make_tiny(digits, clients=4, cohort=4)
    first, second = (aggregated(federation, clients) for clients in ([0, 1, 2, 3], [3, 1, 0, 2]))
    assert_same_tensors(first.weights, second.weights)


def test_neither_state_nor_updates_are_changed_in_place(digits):
    """Catches aliased copies: a head that trains in the round's own state."""
    federation = make_tiny(digits)
    before = {name: value.clone() for name, value in federation.initial_weights.items()}
    after = aggregated(federation, [0, 1])
    assert_same_tensors(federation.initial_weights, before)
    kept = {name: value.clone() for name, value in after.weights.items()}
    federation.load(before, training=True)
    assert_same_tensors(after.weights, kept)


@pytest.mark.parametrize("executor", ["serial", "threads", "batched"])
def test_a_client_that_fails_in_its_turn_ends_the_run_and_is_named(digits, executor):
    federation = make_tiny(digits, clients=3, cohort=3)
    clients = list(federation.clients)
    clients[2] = dataclasses.replace(clients[2], labels=clients[2].labels + 90)
    federation = dataclasses.replace(federation, clients=tuple(clients))
    with pytest.raises(IndexError, match="out of bounds") as caught:
        a_run(federation, V2, executor, tolerate_failures=True)
    assert caught.value.__notes__[0] == "round 0, client 2"


@pytest.mark.parametrize("client", [0, 1])
def test_divergence_is_refused_in_either_half_and_the_client_is_named(digits, client):
    """Catches infinities in the last client's tail, of which no mean is taken, and which the next round would hide."""
    federation = make_tiny(digits)
    clients = list(federation.clients)
    clients[client] = dataclasses.replace(clients[client], inputs=clients[client].inputs * 1e38)
    federation = dataclasses.replace(federation, clients=tuple(clients))
    with pytest.raises(ValueError, match=rf"round 0: client {client}: weights \S+ are not finite .*; lower lr"):
        run_serially(federation, V2, ledger=None)


class FailsToAnswer(SplitFedV2):
    """Client 1 is lost before its turn."""

    def train(self, state, client, **options):
        if client == 1:
            raise OSError("gone")
        return super().train(state, client, **options)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_client_lost_before_its_turn_leaves_the_others_in_their_order(digits, executor):
    federation = make_tiny(digits, clients=4, cohort=4, rounds=1)
    run = a_run(federation, FailsToAnswer(), executor, tolerate_failures=True)
    assert [(note.round, note.client) for note in run.failures] == [(0, 1)]
    assert_same_tensors(run.state.weights, aggregated(federation, [0, 2, 3]).weights)
    rng = numpy_stream(0, round=0, client=SERVER, purpose="splitfed order")
    turns = [client for client in rng.permutation(4).tolist() if client != 1]
    in_turn = tail_after(federation, turns)
    assert_same_tensors({n: v for n, v in run.state.weights.items() if n.startswith("out")}, in_turn)


def tail_after(federation, turns):
    """The tail after these clients' turns, each of them a FedAvg round of its own from head and tail given."""
    world = dict(federation.initial_weights)
    for client in turns:
        state = State(weights=world)
        options = {"plan": None, "own": None, "received": None, "remaining": None, "round": 0}
        weights = METHODS["fedavg"].train(state, client, federation=federation, **options).weights
        world = {n: v if n.startswith("out") else federation.initial_weights[n] for n, v in weights.items()}
    return {name: value for name, value in world.items() if name.startswith("out")}


def test_sharing_is_refused_as_there_is_one_tail():
    for make in (V2.sharing, lambda: SplitFedV2(shares=True)):
        with pytest.raises(ValueError, match=r"has one tail, .*; use splitfed-v1\+sharing"):
            make()
