"""Batched steps against their slow twin, `run_steps` client by client."""

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import all_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated import batched_steps
from asfl_privacy.federated.batched_steps import Targets, batch_network, run_steps_batched
from asfl_privacy.federated.steps import Pool, Rule, run_steps
from asfl_privacy.federated.weights import read_weights
from asfl_privacy.models.nets import Normalize, lenet, small_cnn

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Residual(nn.Module):
    """Only vmap runs it: a forward of its own, and a parameter that no record ever meets."""

    def __init__(self, norm=None):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 3)
        self.norm = norm or nn.Identity()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x = x.flatten(1)
        return self.second(x + torch.tanh(self.norm(self.first(x))))


def frozen_first():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    net[1].weight.requires_grad_(False)
    return net


def still_statistics():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    net[1].eval()
    return net


ROWWISE = {  # records are (1, 3, 4)
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)),
    "no bias, in place": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 8, bias=False), nn.ELU(inplace=True), nn.Linear(8, 3)
    ),
    "linear in the last dimension": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.GELU(), nn.LayerNorm((3, 5)), nn.Flatten(), nn.Linear(15, 3)
    ),
    "pooling": lambda: nn.Sequential(
        Normalize((0.3,), (0.5,)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 1, groups=2, bias=False),
        nn.AvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "ends in a convolution": lambda: nn.Sequential(nn.Conv2d(1, 3, (3, 4)), nn.Flatten()),
    "frozen parameter": frozen_first,
    "batch norm in eval mode": still_statistics,
    "nested, dropout in eval mode": lambda: nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5).eval())), nn.Linear(8, 3)
    ),
}
MIXING = {
    "batch norm 2d": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "batch norm 1d": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=0.3, affine=False), nn.ReLU(), nn.Linear(8, 3)
    ),
    "batch norm without statistics": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
    ),
    "vmap": Residual,
    "vmap with batch norm": lambda: Residual(nn.BatchNorm1d(12)),
}
NETS = {**ROWWISE, **MIXING}


def make_clients(net, sizes, *, dtype=torch.float64, shape=(1, 3, 4), num_classes=3):
    """Different weights and records for each client; the last third of each pool is remote."""
    generator = torch.Generator().manual_seed(len(sizes))
    net.to(dtype)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    starts = [
        {
            name: value + 0.1 * torch.randn(value.shape, generator=generator).to(dtype) if name in trained else value
            for name, value in read_weights(net).items()
        }
        for _ in sizes
    ]
    pools = []
    for n in sizes:
        inputs = torch.randn(n, *shape, generator=generator).to(dtype)
        labels = torch.randint(num_classes, (n,), generator=generator)
        num_own = n - n // 3
        received = inputs[num_own:].clone() if num_own < n else None  # clone: they come from elsewhere
        pools.append(Pool(inputs=inputs[:num_own], received=received, labels=labels))
    return starts, pools


def on_gpu(pool):
    received = None if pool.received is None else pool.received.cuda()
    return replace(pool, inputs=pool.inputs.cuda(), received=received, labels=pool.labels.cuda())


def one_by_one(net, starts, pools, **kwargs):
    results, remote = [], []
    for i, (start, pool) in enumerate(zip(starts, pools, strict=True)):
        twin = copy.deepcopy(net)
        twin.load_state_dict(start)
        remote.append(run_steps(twin, pool, rng=np.random.default_rng(i), **kwargs).num_remote)
        results.append(read_weights(twin))
    return results, remote


def together(net, starts, pools, *, options=None, **kwargs):
    rngs = [np.random.default_rng(i) for i in range(len(pools))]
    return run_steps_batched(batch_network(net, **(options or {})), starts, pools, rngs=rngs, **kwargs)


def assert_same(slow, fast, *, relative):
    for theirs, mine in zip(slow, fast, strict=True):
        assert theirs.keys() == mine.keys()
        for name, value in theirs.items():
            assert value.dtype == mine[name].dtype
            off = (value - mine[name]).abs().max().item()
            assert off <= relative * value.abs().max().item(), f"{name} is off by {off}"


def check(net, sizes, *, dtype=torch.float64, relative=1e-12, options=None, **kwargs):
    torch.manual_seed(0)
    net = net().to(dtype)
    starts, pools = make_clients(net, sizes, dtype=dtype)
    kwargs = {"num_steps": 20, "batch_size": 6, "rule": Rule(0.1), **kwargs}
    slow, remote = one_by_one(net, starts, pools, **kwargs)
    fast, counted = together(net, starts, pools, options=options, **kwargs)
    assert_same(slow, fast, relative=relative)
    assert [one.num_remote for one in counted] == remote


@pytest.mark.parametrize("name", NETS)
def test_batched_steps_leave_what_one_client_after_the_other_leaves(name):
    """Float64, 20 steps, pools below, at and above the batch. Catches every wrong layer, mean, mask and leak."""
    check(NETS[name], [9, 4, 6, 30, 2, 4])


@pytest.mark.parametrize("name", NETS)
def test_in_float32_only_rounding_differs(name):
    check(NETS[name], [9, 4, 6], dtype=torch.float32, relative=1e-5, num_steps=10)


@pytest.mark.parametrize("make", [small_cnn, lenet])
def test_built_in_networks(make):
    torch.manual_seed(0)
    net = make(input_shape=(1, 8, 8), num_classes=3, mean=(0.3,), std=(0.5,)).double()
    starts, pools = make_clients(net, [9, 3], shape=(1, 8, 8))
    kwargs = {"num_steps": 20, "batch_size": 6, "rule": Rule(0.1)}
    assert_same(one_by_one(net, starts, pools, **kwargs)[0], together(net, starts, pools, **kwargs)[0], relative=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["mlp", "pooling", "group norm", "vmap"]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    batch_size=st.integers(1, 16),
)
def test_any_sizes(name, sizes, batch_size):
    check(NETS[name], sizes, batch_size=batch_size, num_steps=3)


def counted_padding(loss):
    return lambda logits, targets: loss(logits, replace(targets, shares=targets.shares.clamp(min=1 / 6)))


def padded_mean(loss):
    return lambda logits, targets: loss(logits, replace(targets, shares=(targets.shares > 0) / 6.0))


def summed(loss):
    return lambda logits, targets: loss(logits, replace(targets, shares=(targets.shares > 0) / 1.0))


def leak(loss):
    return lambda logits, targets: loss(logits + 1e-9 * logits.roll(6, dims=0), targets)


@pytest.mark.parametrize("mutant", [counted_padding, padded_mean, summed, leak])
def test_the_twin_catches_wrong_means_and_a_neighbours_gradient(mutant, monkeypatch):
    """Mutants: padded rows counted in the mean, mean over the padded size, sum, one client's gradient in another's."""
    monkeypatch.setattr(batched_steps, "_loss", mutant(batched_steps._loss))
    with pytest.raises(AssertionError, match="is off by"):
        check(NETS["mlp"], [9, 4, 6])


@pytest.mark.parametrize("name", NETS)
def test_a_client_that_diverges_leaves_the_others_bit_for_bit(name):
    """Catches: 0·NaN across clients, in a product with a mask or in a kernel that mixes groups."""
    net = NETS[name]().double()
    starts, pools = make_clients(net, [9, 4, 9, 4])
    kwargs = {"num_steps": 3, "batch_size": 6, "rule": Rule(0.1)}
    healthy, _ = together(net, starts, pools, **kwargs)
    poisoned = [pool if i != 1 else replace(pool, inputs=pool.inputs * float("nan")) for i, pool in enumerate(pools)]
    others, _ = together(net, starts, poisoned, **kwargs)
    for i in (0, 2, 3):
        assert all(torch.equal(value, others[i][key]) for key, value in healthy[i].items())
    assert any(bool(value.isnan().any()) for value in others[1].values())


def test_equal_clients_leave_equal_weights_whatever_runs_beside_them():
    """Catches: an offset that reads a neighbour's records."""
    net = NETS["pooling"]().double()
    (start, *_), pools = make_clients(net, [7, 7, 7])
    rngs = [np.random.default_rng(5) for _ in range(3)]
    same = [pools[0], pools[1], pools[0]]
    after, _ = run_steps_batched(
        batch_network(net), [start] * 3, same, rngs=rngs, num_steps=4, batch_size=3, rule=Rule(0.1)
    )
    assert all(torch.equal(value, after[2][name]) for name, value in after[0].items())
    assert not torch.equal(after[0]["1.weight"], after[1]["1.weight"])


def test_nothing_that_is_given_changes():
    net = MIXING["batch norm 2d"]()
    starts, pools = make_clients(net, [9, 4])
    pools[1] = replace(pools[1], inputs=pools[0].inputs[2:5])
    before = copy.deepcopy((starts, pools, net.state_dict()))
    together(net, starts, pools, num_steps=3, batch_size=6, rule=Rule(0.1))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before[0], starts, strict=True) for k in a)
    everything = [[all_rows(pool) for pool in part] for part in (before[1], pools)]
    assert all(torch.equal(a, b) for a, b in zip(*everything, strict=True))
    assert all(torch.equal(before[2][k], v) for k, v in net.state_dict().items())


def test_counters_stay_integers_and_count_the_steps():
    net = MIXING["batch norm 2d"]()
    starts, pools = make_clients(net, [9, 4, 4])
    starts[2]["1.num_batches_tracked"] = torch.tensor(10)
    after, _ = together(net, starts, pools, num_steps=3, batch_size=6, rule=Rule(0.1))
    assert [w["1.num_batches_tracked"].item() for w in after] == [3, 3, 13]
    assert after[0]["1.num_batches_tracked"].dtype == torch.int64


def test_a_tail_moves_its_own_weights_and_passes_the_heads_through():
    net = ROWWISE["pooling"]().double()
    tail = nn.Sequential()
    for name, block in list(net.named_children())[4:]:
        tail.add_module(name, block)
    starts, _ = make_clients(net, [5, 8])
    _, pools = make_clients(tail, [5, 8], shape=(4, 1, 2))
    after, _ = together(tail, starts, pools, num_steps=3, batch_size=6, rule=Rule(0.1))
    slow, _ = one_by_one(
        tail, [{k: s[k] for k in tail.state_dict()} for s in starts], pools, num_steps=3, batch_size=6, rule=Rule(0.1)
    )
    assert_same(slow, [{k: a[k] for k in tail.state_dict()} for a in after], relative=1e-12)
    assert all(torch.equal(a["1.weight"], s["1.weight"]) for a, s in zip(after, starts, strict=True))


@pytest.mark.parametrize("name", ["batch norm 2d", "vmap with batch norm"])
def test_the_mode_is_the_one_in_which_the_network_was_prepared(name):
    """Catches: evaluation between rounds that switches batch statistics off."""
    net = MIXING[name]().double()
    starts, pools = make_clients(net, [9, 9])
    prepared = batch_network(net)
    slow, _ = one_by_one(net, starts, pools, num_steps=3, batch_size=6, rule=Rule(0.1))
    net.eval()
    rngs = [np.random.default_rng(i) for i in range(2)]
    fast, _ = run_steps_batched(prepared, starts, pools, rngs=rngs, num_steps=3, batch_size=6, rule=Rule(0.1))
    assert_same(slow, fast, relative=1e-12)


def test_each_clients_weights_are_its_own():
    """Catches: views, which would keep the whole cohort's weights in memory and send them with one client's."""
    net = ROWWISE["mlp"]().double()
    starts, pools = make_clients(net, [9, 4, 6])
    after, _ = together(net, starts, pools, num_steps=1, batch_size=6, rule=Rule(0.1))
    for weights in after:
        for value in weights.values():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
            assert not value.requires_grad


@pytest.mark.parametrize("block", [nn.Dropout(0.5), nn.RReLU()])
def test_layers_that_draw_never_run_as_if_they_did_not(block):
    net = nn.Sequential(nn.Flatten(), block, nn.Linear(12, 3)).double()
    starts, pools = make_clients(net, [9, 4])
    with pytest.raises(RuntimeError, match="vmap"):
        together(net, starts, pools, num_steps=1, batch_size=6, rule=Rule(0.1))


def test_hooks_are_run():
    net = ROWWISE["mlp"]().double()
    net[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    starts, pools = make_clients(net, [9, 4])
    kwargs = {"num_steps": 3, "batch_size": 6, "rule": Rule(0.1)}
    assert_same(one_by_one(net, starts, pools, **kwargs)[0], together(net, starts, pools, **kwargs)[0], relative=1e-12)


T = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.0, 0.3, 0.7]], dtype=torch.float64)


@pytest.mark.parametrize("marks", ["some", "none but the first", "absent"])
@pytest.mark.parametrize("name", ["mlp", "vmap"])
def test_noisy_labels_are_corrected_as_one_client_after_the_other(name, marks):
    """Catches: the correction on every row, on none, by T instead of its transpose, or with masks shifted by a client."""
    net = NETS[name]().double()
    starts, pools = make_clients(net, [9, 4, 20])
    if marks == "some":
        pools = [replace(pool, noisy=torch.arange(len(pool.labels)) >= pool.num_own) for pool in pools]
    elif marks == "none but the first":  # the others' labels all count as noisy, as in `run_steps`
        pools[0] = replace(pools[0], noisy=torch.zeros(9, dtype=torch.bool))
    kwargs = {"num_steps": 10, "batch_size": 6, "rule": Rule(0.1), "transition": T}
    assert_same(one_by_one(net, starts, pools, **kwargs)[0], together(net, starts, pools, **kwargs)[0], relative=1e-12)


def test_noisy_labels_without_a_usable_transition_are_refused():
    net = ROWWISE["mlp"]().double()
    starts, pools = make_clients(net, [9, 4])
    noisy = [replace(pool, noisy=torch.ones(len(pool.labels), dtype=torch.bool)) for pool in pools]
    kwargs = {"num_steps": 1, "batch_size": 6, "rule": Rule(0.1)}
    with pytest.raises(ValueError, match="without a transition"):
        together(net, starts, noisy, **kwargs)
    with pytest.raises(ValueError, match="sums are off 1"):
        together(net, starts, noisy, transition=2 * T, **kwargs)
    with pytest.raises(ValueError, match="transition has 2 classes, the network 3"):
        together(net, starts, noisy, transition=torch.full((2, 2), 0.5), **kwargs)
    with pytest.raises(ValueError, match="one bool a label"):
        together(net, starts, [replace(pools[0], noisy=torch.ones(9)), pools[1]], transition=T, **kwargs)


def test_no_steps_return_the_weights_as_they_were():
    net = ROWWISE["mlp"]().double()
    starts, pools = make_clients(net, [9, 4])
    after, taken = together(net, starts, pools, num_steps=0, batch_size=6, rule=Rule(0.1))
    assert [one.num_remote for one in taken] == [0, 0]
    assert all(torch.equal(a[k], s[k]) for a, s in zip(after, starts, strict=True) for k in s)


def test_wrong_arguments_are_refused():
    net = ROWWISE["mlp"]().double()
    starts, pools = make_clients(net, [9, 4])
    kwargs = {"num_steps": 1, "batch_size": 6, "rule": Rule(0.1)}
    with pytest.raises(ValueError, match="1 weights, 2 pools and 2 generators"):
        together(net, starts[:1], pools, **kwargs)
    with pytest.raises(ValueError, match="weights 1 lack"):
        together(net, [starts[0], {}], pools, **kwargs)
    with pytest.raises(ValueError, match="pool 1 holds 0 inputs"):
        together(
            net,
            starts,
            [pools[0], replace(pools[1], inputs=pools[1].inputs[:0], received=None, labels=pools[1].labels[:0])],
            **kwargs,
        )
    with pytest.raises(ValueError, match="num_steps"):
        together(net, starts, pools, **{**kwargs, "num_steps": -1})
    with pytest.raises(ValueError, match="at_once"):
        together(net, starts, pools, at_once=0, **kwargs)
    with pytest.raises(ValueError, match="batch_size"):
        together(net, starts, pools, **{**kwargs, "batch_size": 0})


def test_a_batch_of_one_record_under_batch_norm_fails_as_one_client_does():
    net = MIXING["batch norm 1d"]().double()
    starts, pools = make_clients(net, [9, 1, 1])
    kwargs = {"num_steps": 1, "batch_size": 6, "rule": Rule(0.1)}
    for way in (one_by_one, together):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            way(net, starts, pools, **kwargs)


@pytest.mark.parametrize("name", ["mlp", "pooling", "batch norm 2d", "vmap"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 10])
def test_how_many_are_computed_together_changes_nothing_but_rounding(name, at_once):
    """Catches: results in the order of computation instead of the clients'."""
    net = NETS[name]().double()
    starts, pools = make_clients(net, [9, 4, 6, 2, 30, 4, 3])
    kwargs = {"num_steps": 5, "batch_size": 6, "rule": Rule(0.1)}
    slow, remote = one_by_one(net, starts, pools, **kwargs)
    fast, counted = together(net, starts, pools, at_once=at_once, **kwargs)
    assert_same(slow, fast, relative=1e-12)
    assert [one.num_remote for one in counted] == remote


def test_channels_in_the_last_dimension_change_nothing_but_rounding():
    check(NETS["group norm"], [9, 4, 6], options={"channels_last": True})
    check(NETS["batch norm 2d"], [9, 4, 6], options={"channels_last": True})


def test_mixed_precision_is_that_of_autocast_and_weights_keep_their_type():
    net = ROWWISE["mlp"]()
    starts, pools = make_clients(net, [40, 40], dtype=torch.float32)
    kwargs = {"num_steps": 5, "batch_size": 32, "rule": Rule(0.1)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slow, _ = one_by_one(net, starts, pools, **kwargs)
    fast, _ = together(net, starts, pools, options={"autocast": torch.bfloat16}, **kwargs)
    plain, _ = together(net, starts, pools, **kwargs)
    assert_same(slow, fast, relative=1e-2)
    assert not torch.equal(fast[0]["1.weight"], plain[0]["1.weight"])


def test_the_loss_sums_shares_not_rows():
    """By hand: two clients of batches 2 and 1; the padded row's loss does not enter."""
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, 0.0], [9.0, -9.0]], dtype=torch.float64)
    targets = Targets(
        labels=torch.tensor([0, 0, 1, 1]), shares=torch.tensor([0.5, 0.5, 1.0, 0.0]), noisy=None, log_transition=None
    )
    by_hand = (np.log1p(np.exp(-1)) + np.log1p(np.exp(2))) / 2 + np.log1p(np.exp(0.5))
    assert batched_steps._loss(logits, targets).item() == pytest.approx(by_hand, rel=1e-14)
    assert F.cross_entropy(logits[:2], targets.labels[:2]).item() < by_hand


def test_compiled_it_is_what_one_client_after_the_other_leaves_and_compiled_once(monkeypatch):
    """Traced as for any backend, run without a C++ compiler, which would take most of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    net = ROWWISE["mlp"]().double()
    starts, pools = make_clients(net, [9, 4, 6])
    kwargs = {"num_steps": 3, "batch_size": 6, "rule": Rule(0.1)}
    slow, _ = one_by_one(net, starts, pools, **kwargs)
    prepared = batch_network(net, compile=True)
    compiled = []
    for _ in range(2):
        rngs = [np.random.default_rng(i) for i in range(3)]
        fast, _ = run_steps_batched(prepared, starts, pools, rngs=rngs, **kwargs)
        assert_same(slow, fast, relative=1e-12)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1]


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("options", [{}, {"channels_last": True}], ids=["plain", "channels last"])
def test_on_a_gpu_it_is_what_one_client_after_the_other_leaves(name, options):
    torch.manual_seed(0)
    net = NETS[name]().double()
    starts, pools = make_clients(net, [9, 4, 6])
    net.cuda()
    starts = [{k: v.cuda() for k, v in s.items()} for s in starts]
    pools = [on_gpu(pool) for pool in pools]
    kwargs = {"num_steps": 20, "batch_size": 6, "rule": Rule(0.1)}
    assert_same(
        one_by_one(net, starts, pools, **kwargs)[0],
        together(net, starts, pools, options=options, **kwargs)[0],
        relative=1e-11,
    )


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("name", ["mlp", "pooling", "batch norm 2d"])
def test_compiled_with_cuda_graphs_it_is_what_one_client_after_the_other_leaves(name):
    torch.manual_seed(0)
    net = NETS[name]().cuda()
    starts, pools = make_clients(net, [9, 9, 9], dtype=torch.float32)
    starts = [{k: v.cuda() for k, v in s.items()} for s in starts]
    pools = [on_gpu(pool) for pool in pools]
    kwargs = {"num_steps": 10, "batch_size": 6, "rule": Rule(0.1)}
    slow, _ = one_by_one(net, starts, pools, **kwargs)
    fast, _ = together(net, starts, pools, options={"compile": True}, **kwargs)
    assert_same(slow, fast, relative=1e-2)
