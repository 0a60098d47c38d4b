"""MOON against what its paper says, and against a loop written out here."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from executor_contract import assert_same_run, assert_same_tensors
from federations import few_records, gaussian, make_federation, make_tiny
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.accounting import Ledger
from asfl_privacy.execution import RunStoppedError, begin_run, run_rounds, run_serially
from asfl_privacy.execution.checkpoint import read_checkpoint, write_checkpoint
from asfl_privacy.execution.choice import choose_executor, make_executor
from asfl_privacy.federated import METHODS, State, sample_cohort
from asfl_privacy.federated.methods.moon import PREVIOUS, Moon, contrastive_loss, contrastive_objective
from asfl_privacy.federated.settings import MethodOptions
from asfl_privacy.federated.streams import numpy_stream
from asfl_privacy.federated.weights import count_bytes, load_weights, read_weights

MOON = Moon()
FEDAVG = METHODS["fedavg"]
STRONG = MethodOptions(mu=5.0, temperature=0.5)
NORMED = {"model_name": "own_nets:norm_and_dropout", "exchange_layer": "head"}


def run(federation, method, *, executor="serial"):
    privacy = federation.privacy
    ledger = None if privacy is None else Ledger(p=privacy.p, radius=privacy.radius)
    with make_executor(executor, federation, method, workers=2) as running:
        return run_rounds(federation, method, executor=running, start=begin_run(federation, ledger=ledger))


def train(method, state, client, *, federation, round=0):
    return method.train(
        state, client, federation=federation, plan=None, own=None, received=None, remaining=None, round=round
    )


def shaken(weights, *, seed=1):
    """The same weights, each a little elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in weights.items()
    }


def papers_loss(h, h_glob, h_prev, *, temperature):
    """As the paper's code has it: cross-entropy of two cosines, the global one the right answer."""
    cosine = nn.CosineSimilarity(dim=-1)
    logits = torch.stack([cosine(h, h_glob), cosine(h, h_prev)], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(h), dtype=torch.int64))


def test_a_mu_of_zero_is_fedavg_bit_for_bit_and_keeps_nothing(digits):
    """Catches a loss that is added at another weight, and draws of mini-batches from another stream."""
    settings = {"options": MethodOptions(mu=0.0), "momentum": 0.5, "weight_decay": 0.01}
    assert_same_run(run(make_federation(digits, **settings), MOON), run(make_federation(digits, **settings), FEDAVG))


@pytest.mark.parametrize("network", [{}, NORMED])
def test_a_clients_first_participation_is_fedavgs_bit_for_bit(digits, network):
    """The previous network is the global one then. With batch norm and dropout: catches frozen networks in training
    mode, whose dropout would draw numbers that training draws, frozen networks that are the trained one with other
    weights, whose statistics would move, and a gradient that is zero up to rounding alone."""
    federation = make_tiny(digits, options=STRONG, rounds=1, full_steps=5, **network)
    assert_same_tensors(run(federation, MOON).state.weights, run(federation, FEDAVG).state.weights)
    more = make_tiny(digits, options=STRONG, rounds=2, full_steps=5, **network)
    moon, fedavg = run(more, MOON).state.weights, run(more, FEDAVG).state.weights
    assert not all(torch.equal(moon[name], value) for name, value in fedavg.items())  # from the second round on


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.07, 0.5, 3.0])
def test_the_loss_is_log_2_with_zero_gradient_where_both_networks_are_the_same(dtype, temperature):
    """Exactly. Catches a gradient that cancels up to rounding."""
    generator = torch.Generator().manual_seed(0)
    h, frozen = (torch.randn(37, 11, generator=generator, dtype=dtype) for _ in range(2))
    loss = contrastive_loss(h.requires_grad_(), h_glob=frozen, h_prev=frozen.clone(), temperature=temperature)
    (gradient,) = torch.autograd.grad(loss, h)
    assert loss.item() == torch.tensor(2.0, dtype=dtype).log().item()
    assert torch.equal(gradient, torch.zeros_like(h))


@pytest.mark.parametrize("temperature", [0.01, 0.5, 3.0])
def test_the_loss_and_its_gradient_are_the_papers(temperature):
    """Catches the wrong target, a temperature that multiplies, and features compared without their norms."""
    generator = torch.Generator().manual_seed(0)
    h, h_glob, h_prev = (torch.randn(50, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    h.requires_grad_()
    ours = contrastive_loss(h, h_glob=h_glob, h_prev=h_prev, temperature=temperature)
    theirs = papers_loss(h, h_glob, h_prev, temperature=temperature)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, h)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)


def test_features_without_a_direction_have_no_gradient():
    """The cosine's own derivative is divided by its guard there. Catches a step of 1e8 on a dead network."""
    h = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    h_glob, h_prev = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    loss = contrastive_loss(h, h_glob=h_glob, h_prev=h_prev, temperature=0.5)
    (gradient,) = torch.autograd.grad(loss, h)
    assert torch.equal(gradient[0], torch.zeros(2))
    assert 0 < float(gradient[1].abs().max()) < 1
    half = F.softplus(torch.tensor(-2.0 / 5**0.5))
    assert loss.item() == pytest.approx((torch.tensor(2.0).log() + half).item() / 2, rel=1e-6)


@pytest.mark.parametrize("sizes", [{"rounds": 2}, {"clients": 3, "cohort": 1, "rounds": 5}])
def test_two_networks_beside_the_trained_one_are_the_loop_written_out_here(digits, sizes):
    """Every round by hand: each client's last own weights for a previous network, whoever took part in between. Catches
    the previous round's global network, another client's, or the client's first weights as the previous one."""
    federation = make_tiny(digits, options=STRONG, tail_steps=3, full_steps=3, **sizes)
    ours = run(federation, MOON).state
    nets = [copy.deepcopy(federation.model) for _ in range(3)]
    weights, last = federation.initial_weights, {}
    for round in range(sizes["rounds"]):
        results = {}
        for client in sample_cohort(federation, round=round):
            network, to_global, to_previous = nets
            for net, values in zip(nets, (weights, weights, last.get(client, weights)), strict=True):
                load_weights(net, values)
            holder = federation.clients[client]
            rng = numpy_stream(0, round=round, client=client, purpose="full steps")
            for _ in range(6):
                batch = torch.from_numpy(rng.choice(holder.num_records, size=8, replace=False))
                x, y = holder.inputs[batch], holder.labels[batch]
                with torch.no_grad():
                    h_glob, h_prev = to_global.body(x), to_previous.body(x)
                h = network.body(x)
                loss = F.cross_entropy(network.out(h), y) + 5.0 * papers_loss(h, h_glob, h_prev, temperature=0.5)
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                        parameter.sub_(0.1 * gradient)
            results[client] = last[client] = read_weights(network)
        counts = {client: federation.clients[client].num_records for client in results}
        weights = {name: sum(results[c][name] * counts[c] for c in results) / sum(counts.values()) for name in weights}
    plain = run(federation, FEDAVG).state.weights
    for name, value in weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-5)
        assert float((plain[name] - value).norm()) > 1e-3
    assert sorted(ours.clients) == sorted(last)
    for client, values in last.items():
        for name, value in values.items():
            torch.testing.assert_close(ours.clients[client][PREVIOUS + name], value, rtol=1e-4, atol=1e-5)


def test_a_client_keeps_the_weights_of_its_own_last_participation(digits):
    """To the bit, over rounds in which it may not be sampled."""
    federation = make_tiny(digits, clients=4, cohort=2, rounds=6, options=STRONG)
    state, sent = State(weights=federation.initial_weights), {}
    for round in range(6):
        updates = {
            c: train(MOON, state, c, federation=federation, round=round) for c in sample_cohort(federation, round=round)
        }
        sent |= {client: update.weights for client, update in updates.items()}
        state = MOON.aggregate(state, updates, federation=federation, round=round)
        state = replace(state, clients=state.clients.updated({c: u.client_state for c, u in updates.items()}))
        assert sorted(state.clients) == sorted(sent)
        for client, weights in sent.items():
            assert_same_tensors(state.clients[client], {PREVIOUS + name: value for name, value in weights.items()})
    assert len(sent) > 2


def test_evaluations_between_rounds_change_nothing(digits):
    """Catches a previous network that is read from the scratch network, which evaluation loads."""
    often, seldom = (
        run(make_tiny(digits, options=STRONG, rounds=4, evaluate_every=every, **NORMED), MOON) for every in (1, 4)
    )
    assert (len(often.evaluations), len(seldom.evaluations)) == (4, 1)
    assert_same_tensors(often.state.weights, seldom.state.weights)
    for client in (0, 1):
        assert_same_tensors(often.state.clients[client], seldom.state.clients[client])


@pytest.mark.parametrize(
    ("executor", "method"), [("threads", MOON), ("threads", MOON.sharing()), ("processes", MOON.sharing())]
)
def test_every_executor_gives_the_serial_run_to_the_bit(digits, executor, method):
    """Catches frozen networks that two threads share, and a previous network that stays in a worker."""
    settings = {"options": STRONG, "clients": 4, "cohort": 3, "rounds": 4, "privacy": gaussian(label_epsilon=2.0)}
    settings |= {} if method.shares else {"privacy": None}
    serial, other = (run(make_tiny(digits, **settings), method, executor=name) for name in ("serial", executor))
    assert_same_run(serial, other)


def test_steps_are_not_batched_unless_mu_is_zero(digits):
    assert choose_executor("auto", make_tiny(digits, options=STRONG), MOON, workers=1).name == "serial"
    none = make_tiny(digits, options=MethodOptions(mu=0.0))
    assert choose_executor("auto", none, MOON, workers=1).name == "batched"


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(digits, tmp_path):
    """Catches a previous network outside the state. The checkpoint is read back from the disk."""
    settings = {"options": STRONG, "clients": 4, "cohort": 2, "rounds": 5}
    whole = run(make_tiny(digits, **settings), MOON)
    cut, kept = make_tiny(digits, **settings), []
    with make_executor("serial", cut, MOON) as running, pytest.raises(RunStoppedError):
        run_rounds(
            cut,
            MOON,
            executor=running,
            start=begin_run(cut, ledger=None),
            after_round=kept.append,
            should_stop=lambda: len(kept) == 2,
        )
    write_checkpoint(tmp_path, kept[-1], fingerprint="moon")
    again = make_tiny(digits, **settings)
    found = read_checkpoint(tmp_path, fingerprint="moon").progress
    with make_executor("serial", again, MOON) as running:
        assert_same_run(run_rounds(again, MOON, executor=running, start=found), whole)


def test_no_more_bytes_travel_than_fedavgs(digits):
    """2P a client and round; the previous network stays where it is."""
    federation = make_tiny(digits, clients=3, cohort=2, rounds=4, options=STRONG, **NORMED)
    moon, fedavg = run(federation, MOON).traffic, run(federation, FEDAVG).traffic
    assert moon == fedavg
    assert moon.model == 4 * 2 * 2 * count_bytes(federation.initial_weights)


def test_a_network_of_one_block_is_refused():
    with pytest.raises(
        ValueError, match=r"the network is one block, fc: .*; split the network into two blocks or more"
    ):
        contrastive_objective(
            nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))), global_weights={}, previous_weights={}, mu=1, temperature=1
        )


def three_blocks(*, in_place):
    """Unflattened features, and blocks that change what they get; the names are those of a head and a tail."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LeakyReLU(0.5, inplace=in_place), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    tail = nn.Sequential(nn.LeakyReLU(0.1, inplace=in_place), nn.Conv2d(3, 2, 2))
    out = nn.Sequential(nn.LeakyReLU(0.2, inplace=in_place), nn.Flatten(), nn.Linear(2 * 3 * 3, 4))
    return nn.Sequential(OrderedDict(head=head, tail=tail, out=out))


def test_features_are_what_the_last_block_reads_however_the_network_is_handed_over():
    """Whole, copied, or as PixelDP's training does it, a head with more in it and a tail. Catches features at the
    exchange layer, features that the last block has changed, and inputs that a frozen network has changed."""
    inputs = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    labels = torch.zeros(6, dtype=torch.int64)
    plain, model = three_blocks(in_place=False), three_blocks(in_place=True)
    weights, before = (shaken(read_weights(plain), seed=seed) for seed in (1, 2))
    objective = contrastive_objective(model, global_weights=weights, previous_weights=before, mu=3.0, temperature=0.5)
    with torch.no_grad():
        features = []
        for values in (weights, before):
            frozen = three_blocks(in_place=False).eval()
            load_weights(frozen, values)
            features.append(frozen.tail(frozen.head(inputs)).flatten(1))
    h = plain.tail(plain.head(inputs))
    expected = 3.0 * papers_loss(h.flatten(1), *features, temperature=0.5)
    gradients = torch.autograd.grad(expected + plain.out(h).square().sum(), list(plain.parameters()))
    shapes = {
        "whole": model,
        "copied": copy.deepcopy(model),
        "head and tail": nn.Sequential(
            OrderedDict(
                head=nn.Sequential(OrderedDict(noise=nn.Identity(), head=model.head)),
                tail=nn.Sequential(OrderedDict(tail=model.tail, out=model.out)),
            )
        ),
        "long head": nn.Sequential(
            OrderedDict(head=nn.Sequential(model.head, nn.Identity(), model.tail), tail=nn.Sequential(model.out))
        ),
    }
    for shape, network in shapes.items():
        logits, extra = objective(network, inputs.clone(), labels)
        torch.testing.assert_close(logits, plain.out(h), msg=shape)
        torch.testing.assert_close(extra, expected, msg=shape)
        found = torch.autograd.grad(extra + logits.square().sum(), list(network.parameters()))
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-5, msg=shape)


def test_features_that_are_no_vectors_are_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    model = nn.Sequential(OrderedDict(pair=Pair(), first=First()))
    objective = contrastive_objective(model, global_weights={}, previous_weights={}, mu=1.0, temperature=1.0)
    with pytest.raises(
        ValueError, match=r"block 'first' reads .*tuple.* for 2 records: .*; let the block before it give"
    ):
        objective(model, torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_pixeldps_training_goes_on_with_noise_in_the_trained_network_alone(digits):
    """First round: ASFL's to the bit, so the frozen networks draw no noise; later it is another run."""
    changes = {"privacy": gaussian(noisy_training=True), "options": STRONG, "exchange_layer": "fc1"}
    changes |= {"model_name": "small-cnn", "partition": "iid", "clients": 2, "cohort": 2}
    data = few_records(digits, 64)
    moon, asfl = (
        [run(make_federation(data, rounds=rounds, **changes), method).state.weights for rounds in (1, 2)]
        for method in (MOON.sharing(), METHODS["asfl"])
    )
    assert_same_tensors(moon[0], asfl[0])
    assert not torch.equal(moon[1]["classifier.weight"], asfl[1]["classifier.weight"])


def test_of_a_noised_update_the_noised_weights_are_kept(digits):
    """They were released, so keeping them gives nothing away, wherever the client's state goes."""
    privacy = gaussian(updates="dp-fedavg", update_multiplier=0.5, update_clip=0.01)
    federation = make_tiny(digits, privacy=privacy, options=STRONG)
    update = train(MOON, State(weights=federation.initial_weights), 0, federation=federation)
    assert len(update.charges) == 1
    assert_same_tensors(update.client_state, {PREVIOUS + name: value for name, value in update.weights.items()})


def test_what_a_client_keeps_of_its_releases_stays(digits):
    """Catches a state that the previous network replaces: each round would randomise the same labels anew."""
    federation = make_tiny(digits, privacy=gaussian(label_epsilon=2.0), options=STRONG, rounds=2)
    moon, asfl = (run(federation, method).state.clients for method in (MOON.sharing(), METHODS["asfl"]))
    for client in (0, 1):
        own = {name: value for name, value in moon[client].items() if not name.startswith(PREVIOUS)}
        assert own
        assert_same_tensors(own, asfl[client])
        assert len(moon[client]) == len(own) + len(federation.initial_weights)


def test_dp_sgd_is_refused(digits):
    """Its clipping covers gradients of each record's own loss alone."""
    federation = make_tiny(digits, privacy=gaussian(updates="dp-sgd", update_multiplier=3.0), options=STRONG)
    with pytest.raises(ValueError, match="updates dp-sgd noises plain gradients alone"):
        run_serially(federation, MOON, ledger=Ledger(p=2.0, radius=1.0))


def test_mixed_precision_compares_features_in_float32(digits):
    """Catches features that are compared in bfloat16, and a loss that is not finite."""
    federation = make_tiny(digits, options=STRONG, precision="bfloat16", rounds=2)
    result = run(federation, MOON)
    assert all(bool(torch.isfinite(value).all()) for value in result.state.weights.values())
    features = nn.Sequential(OrderedDict(body=nn.Identity(), out=nn.Identity()))
    objective = contrastive_objective(features, global_weights={}, previous_weights={}, mu=1.0, temperature=0.5)
    _, extra = objective(features, torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    assert extra.dtype == torch.float32


def test_a_projection_head_is_where_features_are_compared(digits):
    """The block before the last is the projection; MOON runs on it, and a weight of it moves with the contrast."""
    settings = {"model_name": "federations:tiny_net+projection:5", "options": STRONG, "rounds": 2}
    federation = make_tiny(digits, **settings)
    assert [name for name, _ in federation.model.named_children()] == ["body", "projection", "out"]
    moon, fedavg = run(federation, MOON).state.weights, run(federation, FEDAVG).state.weights
    assert moon["projection.3.weight"].shape == (5, 8)
    assert not torch.equal(moon["projection.3.weight"], fedavg["projection.3.weight"])
