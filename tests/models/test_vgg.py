"""VGG-11 is the published one: its parameters counted by hand, its function beside torchvision's."""

import itertools

import pytest
import torch
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from asfl_privacy.models import NETS, block_names

CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10, "mean": (0.5,), "std": (0.25,)}


@pytest.mark.parametrize("name", ["vgg11", "vgg11-bn"])
def test_parameters_are_those_of_column_a(name):
    """By hand; 9,231,114 is what public code for CIFAR-10 has with batch norm."""
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convolutions = sum(9 * a * b + b for a, b in itertools.pairwise(widths))
    expected = convolutions + 2 * sum(widths[1:]) + 512 * 10 + 10
    assert expected == 9_231_114
    assert sum(parameter.numel() for parameter in NETS[name](**CIFAR).parameters()) == expected


@pytest.mark.parametrize("side", [32, 64])
def test_on_whole_halvings_the_features_are_torchvisions(side):
    """Catches a pool at the wrong place and a norm behind the ReLU."""
    net = NETS["vgg11-bn"](input_shape=(3, side, side), num_classes=10, mean=(0.5,), std=(0.25,)).eval()
    other = make_layers(cfgs["A"], batch_norm=True).eval()
    ours = [value for key, value in net.state_dict().items() if key.startswith("conv")]
    other.load_state_dict(dict(zip(other.state_dict(), ours, strict=True)))
    x = torch.rand((2, 3, side, side), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = other((x - 0.5) / 0.25)
        assert features.shape == (2, 512, side // 32, side // 32)
        expected = net.get_submodule("classifier")(features.mean((2, 3)))
        assert torch.allclose(net(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 17, 17), (1, 28, 28), (3, 32, 32)])
def test_no_convolution_works_on_a_single_pixel(shape):
    """The reason for the least size: with pools that round down, 28×28 would end before the last convolution."""
    net = NETS["vgg11"](input_shape=shape, num_classes=10, mean=(0.5,), std=(0.25,))
    x, sides = torch.rand((1, *shape)), []
    with torch.no_grad():
        for block in net:
            if isinstance(block, nn.Sequential) and isinstance(block[0], nn.Conv2d):
                sides.append(min(x.shape[2:]))
            x = block(x)
    assert len(sides) == 8
    assert sides[-1] == 2


def test_each_convolution_can_end_the_head():
    names = block_names(NETS["vgg11"](**CIFAR))
    assert names == ("normalize", *(f"conv{n}" for n in range(1, 9)), "pool", "classifier")
