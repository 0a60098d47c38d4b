"""The head/tail split: nothing lost, nothing computed twice, and no head that mixes records."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asfl_privacy.cells import make_cells
from asfl_privacy.config import SweepConfig
from asfl_privacy.data import make_dataset
from asfl_privacy.models import NETS, block_names, build_model, split_model
from asfl_privacy.models.split import activation_bytes
from asfl_privacy.run import prepare_run


@pytest.mark.parametrize("name", ["small-cnn", "lenet"])
def test_the_tail_of_the_head_is_the_whole_network_at_every_block(name, digits):
    model = build_model(name, data=digits, seed=0)
    inputs = digits.train_inputs[:7]
    for block in block_names(model)[:-1]:
        split = split_model(model, block)
        assert torch.equal(split.tail(split.head(inputs)), model(inputs))
        parameters = [*split.head.parameters(), *split.tail.parameters()]
        assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]


def test_auto_without_a_shape_is_refused(digits):
    with pytest.raises(ValueError, match="auto needs the shape of one record"):
        split_model(build_model("lenet", data=digits, seed=0), "auto")


def test_a_module_that_stands_as_two_blocks_is_refused():
    """torch's iterators leave it out the second time: the tail would lose its activation function unseen."""
    relu = nn.ReLU()
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=relu, c=nn.Linear(3, 3), d=relu, e=nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="block d is the same module as block b"):
        split_model(model, "a")


@pytest.mark.parametrize("layer", ["classifier", "conv9", "", "conv1.0"])
def test_a_layer_that_cannot_end_the_head_lists_those_that_can(layer, digits):
    with pytest.raises(ValueError, match="use auto or one of normalize, conv1, conv2, fc1"):
        split_model(build_model("small-cnn", data=digits, seed=0), layer)


def batch_norm_net(**options):
    return nn.Sequential(
        OrderedDict(
            conv=nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, **options), nn.ReLU()),
            out=nn.Sequential(nn.Flatten(), nn.Linear(72, 2)),
        )
    )


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_a_head_with_batch_statistics_is_refused_by_name(options):
    model = batch_norm_net(**options)
    if options:
        model.eval()  # without running statistics evaluation mode still uses the batch's
    with pytest.raises(ValueError, match=r"head layer conv\.1 is BatchNorm2d in train mode: its output mixes records"):
        split_model(model, "conv")


def test_a_batch_norm_that_the_factory_froze_is_accepted():
    model = batch_norm_net()
    model.get_submodule("conv.1").eval()
    assert split_model(model, "conv").exchange_layer == "conv"


def dense(*widths):
    """Linear layers and activation functions as blocks of their own: fc1, act1, fc2, …; the last layer alone."""
    blocks = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), start=1):
        blocks[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        blocks[f"act{number}"] = nn.ReLU()
    del blocks[f"act{len(widths) - 1}"]
    return nn.Sequential(blocks)


def automatic(model, input_shape):
    return split_model(model, "auto", input_shape=input_shape)


@pytest.mark.parametrize(
    ("name", "shape", "layer", "numbers"),
    [
        ("small-cnn", (1, 28, 28), "conv2", "6,272 of 12,544 bytes a record, 95.5 %"),  # 32·7·7 and 16·14·14 floats
        ("small-cnn", (1, 8, 8), "conv2", "2,048 of 4,096 bytes a record, 87.5 %"),
        # fc1 is small enough, but a tenth of the parameters lie behind it; conv2 has 784 values to conv1's 1,176
        ("lenet", (1, 28, 28), "conv1", "4,704 of 4,704 bytes a record, 99.9 %"),
    ],
)
def test_auto_takes_the_earliest_small_block_that_leaves_the_tail_half_of_the_parameters(name, shape, layer, numbers):
    """Catches: the last instead of the earliest, the raw records behind `normalize` counted in, no share asked."""
    split = automatic(NETS[name](input_shape=shape, num_classes=10, mean=(0.5,), std=(0.5,)), shape)
    assert split.exchange_layer == layer
    assert numbers in split.reason


@given(widths=st.lists(st.integers(1, 24), min_size=3, max_size=7))
@settings(deadline=None, max_examples=60)
def test_auto_follows_its_rule_word_for_word(widths):
    """The rule again, from widths alone; catches < for ≤, and a cut before the activation function."""
    params = [(fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths)]
    hidden = list(range(1, len(widths) - 1))  # act1, act2, …
    largest = max(widths[k] for k in hidden)
    good = [k for k in hidden if widths[k] <= largest / 2 and sum(params[k:]) >= sum(params) / 2]
    split = automatic(dense(*widths), (widths[0],))
    assert split.exchange_layer == f"act{(good or hidden)[0]}"
    words = "the earliest that takes" if good else "the earliest, as none takes"
    assert split.reason.startswith(f"of the blocks between layers with parameters {words}")


def test_auto_says_so_where_only_records_could_leave():
    plain = nn.Sequential(OrderedDict(flat=nn.Flatten(), out=nn.Linear(4, 2)))
    split = automatic(plain, (1, 2, 2))
    assert split.exchange_layer == "flat"
    assert "what leaves is the records under a fixed map" in split.reason


def test_auto_passes_over_blocks_that_mix_records_and_is_refused_where_all_do():
    """Catches a fall back on the raw records where the layers behind them are refused."""
    blocks = OrderedDict(a=nn.Linear(8, 8), b=nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)), c=nn.Linear(2, 90))
    assert automatic(nn.Sequential(blocks), (8,)).exchange_layer == "a"
    mixed = nn.Sequential(
        OrderedDict(flat=nn.Flatten(), bn=nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)), c=blocks["c"])
    )
    with pytest.raises(ValueError, match=r"head layer bn\.1 is BatchNorm1d in train mode"):
        automatic(mixed, (8,))


class Odd(nn.Module):
    """Counts its calls and draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + torch.rand(())


def test_looking_at_activations_leaves_the_network_and_the_global_generator_as_they_were():
    model = nn.Sequential(OrderedDict(a=nn.Sequential(nn.Linear(2, 4), Odd()), b=nn.Dropout(), c=nn.Linear(4, 2)))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert activation_bytes(model, input_shape=(2,)) == {"a": 16, "b": 16}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.a[1].calls == 0
    assert model.training
    assert model.b.training


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_block_that_gives_no_single_tensor_cannot_be_chosen():
    model = nn.Sequential(
        OrderedDict(
            a=nn.Sequential(nn.Linear(4, 2), Pair()), b=nn.Sequential(First(), nn.Linear(2, 8)), c=nn.Linear(8, 9)
        )
    )
    assert activation_bytes(model, input_shape=(4,)) == {"a": None, "b": 32}
    assert automatic(model, (4,)).exchange_layer == "b"


def test_a_network_that_is_cut_nowhere_may_hold_batch_norm_anywhere():
    """FedAvg trains batch-norm networks as they are; only what leaves must not mix records."""
    net = nn.Sequential(
        OrderedDict(
            conv=nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), out=nn.Sequential(nn.Flatten(), nn.Linear(72, 2))
        )
    )
    with pytest.raises(ValueError, match="its output mixes records"):
        split_model(net, "auto", input_shape=(1, 8, 8))
    assert split_model(net, "auto", input_shape=(1, 8, 8), may_mix=True).exchange_layer == "conv"
    config = SweepConfig(
        mech="none", method="fedavg", model="resnet20-bn", partition="iid", clients=2, cohort=2, seeds=1
    )
    rng = np.random.default_rng(0)
    records = (rng.random((24, 3, 16, 16)), np.arange(24) % 2)
    cell = next(cell for cell in make_cells(config) if cell.method == "fedavg")
    run = prepare_run(config, cell, data=make_dataset("mine", train=records, test=records))
    assert run.cell.exchange_layer is None
