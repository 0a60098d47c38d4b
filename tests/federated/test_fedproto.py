"""FedProto's invariants: networks stay at home, prototypes are class means, and nothing is pulled to zero."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import gaussian, make_federation, make_tiny
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.execution import RunStoppedError, begin_run, run_rounds, run_serially
from asfl_privacy.execution.checkpoint import read_checkpoint, write_checkpoint
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.execution.executor import ExecutorRefusedError
from asfl_privacy.federated import METHODS, MethodOptions, State, Update, sample_cohort
from asfl_privacy.federated.client_states import DiskClientStates
from asfl_privacy.federated.methods.fedproto import (
    COUNT,
    GLOBAL,
    KNOWN,
    MEAN,
    OWN,
    SENT,
    FedProto,
    class_means,
    nearest,
    pull,
)
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import count_bytes

METHOD = FedProto()
SKEWED = {"partition": "dirichlet:0.1", "rounds": 4}


def run_of(federation, executor="serial", **named):
    with make_executor(executor, federation, METHOD, workers=2) as running:
        return run_rounds(federation, METHOD, executor=running, start=begin_run(federation, ledger=None), **named)


def options(**changes):
    return {"options": MethodOptions(**changes)}


def own_weights(state, client, federation):
    kept = state.clients.get(client, {})
    return {name: kept.get(OWN + name, value) for name, value in federation.initial_weights.items()}


class Twin:
    """FedProto one record at a time, written out: networks in a list, prototypes in a dictionary."""

    def __init__(self, federation, *, weight, is_weighted):
        self.federation, self.weight, self.is_weighted = federation, weight, is_weighted
        self.networks = [copy.deepcopy(federation.model) for _ in federation.clients]
        self.prototypes = {}

    def features(self, network, x):
        return network[:-1](x.unsqueeze(0)).flatten()

    def round(self, number):
        settings, sent = self.federation.settings, {}
        for client in sample_cohort(self.federation, round=number):
            network, holder = self.networks[client].train(), self.federation.clients[client]
            rng = numpy_stream(settings.seed, round=number, client=client, purpose="full steps")
            size = min(settings.batch_size, holder.num_records)
            for _ in range(settings.tail_steps + settings.full_steps):
                loss = 0.0
                for i in rng.choice(holder.num_records, size=size, replace=False):
                    x, y = holder.inputs[i], holder.labels[i]
                    loss = loss + F.cross_entropy(network(x.unsqueeze(0)), y.unsqueeze(0)) / size
                    if int(y) in self.prototypes:
                        gap = self.features(network, x) - self.prototypes[int(y)]
                        loss = loss + self.weight * (gap**2).sum() / len(gap) / size
                network.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in network.parameters():
                        parameter -= settings.lr * parameter.grad
            network.eval()
            for x, y in zip(holder.inputs, holder.labels.tolist(), strict=True):
                with torch.no_grad():
                    sent.setdefault(y, {}).setdefault(client, []).append(self.features(network, x))
        for label, by_client in sent.items():
            if self.is_weighted:
                rows = [row for rows in by_client.values() for row in rows]
            else:
                rows = [torch.stack(rows).mean(0) for rows in by_client.values()]
            self.prototypes[label] = torch.stack(rows).mean(0)


@pytest.mark.parametrize("mean", ["weighted", "unweighted"])
def test_rounds_are_those_of_the_slow_twin(digits, mean):
    """Catches prototypes from before the steps or of the last mini-batch, a pull to zero of classes without a prototype,
    a distance summed where a mean is due, networks that are averaged or begin anew, and clients weighed by all records.
    """
    federation = make_tiny(
        digits, clients=3, cohort=2, partition="dirichlet:0.3", rounds=3, tail_steps=3, evaluate_every=3,
        **options(prototype_weight=3.0, prototype_mean=mean),
    )  # fmt: skip
    twin = Twin(federation.replica(), weight=3.0, is_weighted=mean == "weighted")
    done = run_of(federation)
    for number in range(3):
        twin.round(number)
    known = done.state.server[KNOWN]
    assert {c for c, is_known in enumerate(known.tolist()) if is_known} == set(twin.prototypes)
    for label, prototype in twin.prototypes.items():
        torch.testing.assert_close(done.state.server[GLOBAL][label], prototype, rtol=1e-4, atol=1e-5)
    assert len(done.state.clients) == 3
    for client, network in enumerate(twin.networks):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(own_weights(done.state, client, federation)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["small-cnn", "own_nets:norm_and_dropout"])
def test_without_weight_the_run_is_that_of_clients_alone_bit_for_bit(digits, model):
    """Catches networks or running statistics that are averaged, and a term of weight 0 that is added all the same.

    Each client alone is FedAvg of one client, whose mean is its own weights.
    """
    named = {"model_name": model, "exchange_layer": "auto", **SKEWED}
    federation = make_federation(digits, **named, **options(prototype_weight=0.0))
    done = run_of(federation)
    alone = make_federation(digits, **named)
    weights = [alone.initial_weights] * 6
    for number in range(4):
        for client in sample_cohort(alone, round=number):
            with make_executor("serial", alone, METHODS["fedavg"]) as running:
                state, cohort = State(weights=weights[client]), (client,)
                collected = running.collect(state, cohort, plan=None, remaining=None, round=number)
                updates = running.train(
                    state, cohort, plan=None, collected=collected, received={}, remaining=None, round=number
                )
            weights[client] = METHODS["fedavg"].aggregate(state, updates, federation=alone, round=number).weights
    for client in range(6):
        assert_same_tensors(own_weights(done.state, client, federation), weights[client])


def test_weight_changes_networks_and_brings_their_prototypes_together(digits):
    """Catches a pull that never reaches the gradient; the prototypes of one class spread less where they are pulled."""

    def spread(weight):
        federation = make_federation(
            digits, model_name="federations:tiny_net", exchange_layer="body", partition="dirichlet:0.5", cohort=6,
            rounds=20, evaluate_every=20, **options(prototype_weight=weight),
        )  # fmt: skip
        clients, total = run_of(federation).state.clients, 0.0
        for label in range(10):
            owners = torch.stack([clients[c][MEAN][label] for c in range(6) if clients[c][COUNT][label]])
            total += float(owners.var(0, correction=0).sum() / owners.mean(0).square().sum())
        return total

    assert spread(5.0) < 0.8 * spread(0.0)


def test_nothing_of_a_network_leaves_its_client_and_the_global_weights_stay(digits):
    """Catches an update that carries the weights, which the server could average, or a log could keep."""
    federation = make_federation(digits, **SKEWED)
    state = State(weights=federation.initial_weights)
    update = METHOD.train(state, 0, federation=federation, plan=None, own=None, received=None, remaining=None, round=0)
    assert update.weights == {}
    done = run_of(federation)
    assert_same_tensors(done.state.weights, make_federation(digits, **SKEWED).initial_weights)
    assert set(done.state.server) == {GLOBAL, KNOWN, SENT}


def update_of(means, counts):
    kept = {MEAN: torch.tensor(means), COUNT: torch.tensor(counts, dtype=torch.int32)}
    return Update(weights={}, num_records=99, drawn=0, drawn_remote=0, client_state=kept)


@pytest.mark.parametrize(("mean", "first"), [("weighted", [7.0, 1.0]), ("unweighted", [5.0, 1.0])])
def test_the_servers_mean_by_hand(digits, mean, first):
    """Catches a mean over clients without the class, one weighted by all records, the paper's second division by the
    number of clients, a class that nobody sent set to zero or forgotten, and new classes that do not become known.
    """
    federation = make_tiny(digits, **options(prototype_mean=mean))
    updates = {
        4: update_of([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [8.0, 8.0]], [1, 0, 0, 2]),
        2: update_of([[9.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [3, 0, 0, 0]),
    }
    server = {
        GLOBAL: torch.tensor([[50.0, 50.0], [6.0, 7.0], [0.0, 0.0], [0.0, 0.0]]),
        KNOWN: torch.tensor([True, True, False, False]),
        SENT: torch.zeros(4, dtype=torch.bool),
    }
    state = State(weights=federation.initial_weights, server=server)
    after = METHOD.aggregate(state, updates, federation=federation, round=3)
    # class 0: (1·1 + 3·9)/4 = 7 by counts and (1 + 9)/2 = 5 by clients; 1: kept; 2: nobody's ever; 3: client 4's alone
    assert after.server[GLOBAL].tolist() == [first, [6.0, 7.0], [0.0, 0.0], [8.0, 8.0]]
    assert after.server[KNOWN].tolist() == [True, True, False, True]
    assert after.server[SENT].tolist() == [True, True, False, False]
    assert after.weights is state.weights


def test_classes_without_a_prototype_add_nothing_by_hand():
    """Catches a pull to zero, and a mean over the pulled records alone."""
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    with torch.no_grad():
        network[0].weight.copy_(torch.eye(2))
    prototypes, known = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([True, False])
    inputs, labels = torch.tensor([[3.0, 2.0], [5.0, 7.0]]), torch.tensor([0, 1])
    logits, extra = pull(prototypes, known, weight=10.0)(network, inputs, labels)
    assert torch.equal(logits, network(inputs))
    # λ/(b·d) · ((3−1)² + (2−1)²) = 10/4·5, and its gradient 10/4·2·(h − C̄) xᵀ of the first record alone
    assert float(extra.detach()) == 12.5
    (gradient,) = torch.autograd.grad(extra, [network[0].weight])
    assert gradient.tolist() == [[5.0 * 2 * 3, 5.0 * 2 * 2], [5.0 * 3, 5.0 * 2]]
    nothing = pull(prototypes, known, weight=10.0)(network, inputs[1:], labels[1:])[1]
    (gradient,) = torch.autograd.grad(nothing, [network[0].weight])
    assert (float(nothing.detach()), float(gradient.abs().max())) == (0.0, 0.0)


def test_the_pull_is_of_what_enters_the_last_block_even_if_that_works_in_place():
    network = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)))
    inputs = torch.tensor([[-2.0, 0.0]], requires_grad=True).clone()
    _, extra = pull(torch.zeros(1, 2), torch.tensor([True]), weight=1.0)(network, inputs, torch.tensor([0]))
    assert float(extra.detach()) == 2.0


def test_prototypes_are_means_of_all_own_records_in_evaluation_mode(digits):
    """Catches dropout or batch statistics in the frozen pass, sums, and zero rows that count."""
    federation = make_federation(digits, model_name="own_nets:norm_and_dropout", exchange_layer="auto", **SKEWED)
    means, counts = class_means(federation.initial_weights, 1, federation=federation)
    holder, twin = federation.clients[1], federation.replica()
    twin.load(federation.initial_weights, training=False)
    for label in range(10):
        rows = [i for i, y in enumerate(holder.labels.tolist()) if y == label]
        assert counts[label] == len(rows)
        expected = twin.model[:-1](holder.inputs[rows]).mean(0) if rows else torch.zeros(16)
        torch.testing.assert_close(means[label], expected.detach(), rtol=1e-5, atol=1e-6)
    assert 0 in counts


def test_bytes_are_those_of_prototypes_by_hand(digits):
    """Catches 2P, classes that a client lacks, prototypes of the round's end counted as its start's, and a free label."""
    federation = make_federation(digits, **SKEWED, evaluate_every=1)
    done = run_of(federation)
    known, total, seen = set(), 0, []
    for number in range(4):
        cohort = sample_cohort(federation, round=number)
        own = [set(federation.clients[client].labels.tolist()) for client in cohort]
        total += sum(len(classes) for classes in own) * (64 * 4 + 1 + 4) + len(cohort) * len(known) * (64 * 4 + 1)
        known |= set().union(*own)
        seen.append(total)
    assert [evaluation.traffic.model for evaluation in done.evaluations] == seen
    assert (done.traffic.activations, done.traffic.labels) == (0, 0)
    assert total < 2 * count_bytes(federation.initial_weights)  # less in four rounds than one client of FedAvg in one


def slow_measures(state, federation):
    """Record by record."""
    data, sums, clients = federation.data, [0.0, 0.0, 0.0], 0
    for client, holder in enumerate(federation.clients):
        federation.load(own_weights(state, client, federation), training=False)
        own = holder.labels.tolist()
        weight_of_right, weight = [0.0, 0.0, 0.0], 0.0
        for x, y in zip(data.test_inputs, data.test_labels.tolist(), strict=True):
            share = own.count(y) / data.test_labels.tolist().count(y)
            if not share:
                continue
            with torch.no_grad():
                h = federation.model[:-1](x.unsqueeze(0)).flatten()
                answers = [int(federation.model(x.unsqueeze(0)).argmax())]
            for classes in (set(own), set(range(10))):
                gaps = {c: float((h - state.server[GLOBAL][c]).norm()) for c in classes if state.server[KNOWN][c]}
                answers.append(min(gaps, key=gaps.get) if gaps else None)
            weight += share
            weight_of_right = [w + share * (a == y) for w, a in zip(weight_of_right, answers, strict=True)]
        if weight:
            sums, clients = [s + w / weight for s, w in zip(sums, weight_of_right, strict=True)], clients + 1
    return [s / clients for s in sums]


def test_measures_are_those_of_the_slow_twin(digits):
    """Catches accuracy on all test records, clients left out because they were never sampled, prototypes of unknown
    classes (zeros) that are named, own classes taken for all, and classes that are not tested counted as wrong.
    """
    few = replace(digits, test_inputs=digits.test_inputs[:60], test_labels=digits.test_labels[:60])
    few = replace(
        few, test_inputs=few.test_inputs[few.test_labels != 3], test_labels=few.test_labels[few.test_labels != 3]
    )
    federation = make_federation(few, partition="dirichlet:0.05", cohort=2, rounds=2, evaluate_every=2)
    done = run_of(federation)
    assert not done.state.server[KNOWN].all()
    assert len(done.state.clients) < 6
    measured = done.evaluations[-1].measures
    assert list(measured) == ["personal_accuracy", "prototype_accuracy_local", "prototype_accuracy_all"]
    assert list(measured.values()) == pytest.approx(slow_measures(done.state, federation.replica()), abs=1e-12)
    assert len({*measured.values()}) == 3


def test_test_records_of_other_classes_alone_are_refused(digits):
    elsewhere = replace(digits, test_labels=torch.full_like(digits.test_labels, 10), num_classes=11)
    with pytest.raises(ValueError, match=r"no client has a record of any class among the test records.*; give"):
        run_of(make_federation(elsewhere, rounds=1))


def test_the_global_accuracy_is_blank_and_evaluation_touches_no_training(digits):
    """Catches the initial network's accuracy in the global column, and a frozen pass that leaves its mark."""
    often, once = (run_of(make_federation(digits, **SKEWED, evaluate_every=k)) for k in (1, 4))
    assert [(e.accuracy, e.loss) for e in often.evaluations] == [(None, None)] * 4
    assert often.evaluations[-1].measures == once.evaluations[-1].measures
    assert_same_run(replace(often, evaluations=()), replace(once, evaluations=()))


def test_nearest_names_no_class_that_it_may_not():
    points, prototypes = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert nearest(points, prototypes, among=torch.tensor([False, True])).tolist() == [1, 1]
    assert nearest(points, prototypes, among=torch.tensor([False, False])).tolist() == [-1, -1]


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_every_executor_gives_the_same_run_to_the_bit(digits, executor):
    """Catches networks that processes begin from what another client's task left, and unequal frozen passes."""
    serial, other = (
        run_of(make_tiny(digits, clients=5, cohort=3, partition="dirichlet:0.3"), e) for e in ("serial", executor)
    )
    assert_same_run(serial, other)


def test_what_a_block_keeps_of_one_clients_records_does_not_show_in_anothers_prototypes(digits):
    """Against a federation that saw no other client: catches a frozen pass in the shared scratch network."""
    named = {"model_name": "own_nets:keeps", "exchange_layer": "auto", **SKEWED}
    federation, fresh = make_federation(digits, **named), make_federation(digits, **named)
    class_means(federation.initial_weights, 0, federation=federation)
    after, alone = (class_means(fresh.initial_weights, 1, federation=one)[0] for one in (federation, fresh))
    assert torch.equal(after, alone)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_steps_are_never_batched(digits, weight):
    """The batched executor would begin with the global network: catches λ = 0 taken for plain steps of it."""
    federation = make_tiny(digits, **options(prototype_weight=weight))
    assert choose_executor("auto", federation, METHOD, workers=1).name == "serial"
    with pytest.raises(ExecutorRefusedError, match="fedproto minimises more than the loss"):
        make_executor("batched", federation, METHOD)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_cut_in_two_is_the_whole_run(digits, tmp_path, on_disk):
    """Through a checkpoint on the disk, in the middle: catches a network or a prototype that is not in the state."""
    named = {"clients": 5, "cohort": 3, "partition": "dirichlet:0.3", "rounds": 4}
    whole, federation, latest = run_of(make_tiny(digits, **named)), make_tiny(digits, **named), []
    start = begin_run(federation, ledger=None)
    if on_disk:
        start = replace(start, state=replace(start.state, clients=DiskClientStates(tmp_path / "clients")))
    asked = iter([False, False, True])
    with pytest.raises(RunStoppedError), make_executor("serial", federation, METHOD) as running:
        run_rounds(
            federation,
            METHOD,
            executor=running,
            start=start,
            should_stop=lambda: next(asked),
            after_round=latest.append,
        )
    write_checkpoint(tmp_path, latest[-1], fingerprint="f")
    kept = read_checkpoint(tmp_path, fingerprint="f").progress
    again = make_tiny(digits, **named)
    with make_executor("threads", again, METHOD, workers=2) as running:
        rest = run_rounds(again, METHOD, executor=running, start=kept)
    assert_same_run(whole, rest)
    assert rest.evaluations[0].measures == whole.evaluations[0].measures


def test_sharing_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"head of its own.*use fedproto alone") as refusal:
        METHOD.sharing()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("changes", [{}, {"updates": "dp-sgd"}, {"updates": "dp-fedavg"}])
def test_a_private_run_is_refused_as_a_prototype_may_be_one_records(digits, changes):
    """Catches a ledger of what is noised, or of nothing, beside prototypes in the clear."""
    federation = make_tiny(digits, privacy=gaussian(**changes, update_multiplier=3.0 if changes else None))
    with pytest.raises(ValueError, match="fedproto in a private run: its clients send class prototypes"):
        METHOD.prepare(State(weights=federation.initial_weights), federation=federation, round=0)
    assert METHOD.exposes_records
    alone = make_tiny(digits)
    holder = alone.clients[0]
    label = int(holder.labels[0])
    labels = torch.where(holder.labels == label, (label + 1) % 10, holder.labels)
    labels[0] = label
    alone = replace(alone, clients=(replace(holder, labels=labels),))
    mean, count = class_means(alone.initial_weights, 0, federation=alone)
    assert count[label] == 1
    torch.testing.assert_close(mean[label], alone.model[:-1](holder.inputs[:1]).flatten().detach())


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_out_of_range_are_refused(digits, weight):
    with pytest.raises(ValueError, match=f"prototype_weight {weight} must be a finite number"):
        run_serially(make_tiny(digits, **options(prototype_weight=weight)), METHOD, ledger=None)
    with pytest.raises(ValueError, match="prototype_mean 'mean' is unknown; use weighted or unweighted"):
        run_serially(make_tiny(digits, **options(prototype_mean="mean")), METHOD, ledger=None)


def test_divergence_is_named_where_no_average_would_show_it(digits):
    """Catches NaN that a client keeps for itself."""
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"round 0, client .* not finite.*lower lr"):
        run_serially(make_tiny(digits, lr=1e30), METHOD, ledger=None)


def test_a_classifier_alone_that_diverged_is_named_too(digits):
    """Catches a look at the prototypes alone, which the last block does not touch."""
    federation = make_tiny(digits)
    weights = {**federation.initial_weights, "out.bias": torch.full((10,), math.nan)}
    update = Update(weights=weights, num_records=24, drawn=0, drawn_remote=0)
    state = State(weights=federation.initial_weights)
    with pytest.raises(ValueError, match=r"weights out.bias are not finite after local steps.*lower lr"):
        METHOD.finish(update, state, 0, steps=(), federation=federation, round=0)
