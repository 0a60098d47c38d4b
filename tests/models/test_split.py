"""The head/tail split: nothing lost, nothing computed twice, and no head that mixes records."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.models import block_names, build_model, split_model


@pytest.mark.parametrize("name", ["small-cnn", "lenet"])
def test_the_tail_of_the_head_is_the_whole_network_at_every_block(name, digits):
    model = build_model(name, data=digits, seed=0)
    inputs = digits.train_inputs[:7]
    for block in block_names(model)[:-1]:
        split = split_model(model, block)
        assert torch.equal(split.tail(split.head(inputs)), model(inputs))
        parameters = [*split.head.parameters(), *split.tail.parameters()]
        assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]


def test_auto_takes_the_last_block_with_a_convolution(digits):
    assert split_model(build_model("lenet", data=digits, seed=0), "auto").exchange_layer == "conv2"
    dense = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.ReLU(), c=nn.Linear(3, 2)))
    assert split_model(dense, "auto").exchange_layer == "b"


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
