"""ResNet-20 is the published one: its parameters counted by hand, its function beside torchvision's blocks."""

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from asfl_privacy.models import NETS, block_names

CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10, "mean": (0.5,), "std": (0.25,)}


@pytest.fixture(params=["resnet20", "resnet20-bn"])
def name(request):
    return request.param


def test_parameters_are_those_of_the_paper(name):
    """By hand: 0.27 million (He et al. 2016, table 6). Option B's 1×1 convolutions would give 2,752 more."""
    convolutions = 3 * 3 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    classifier = 64 * 10 + 10
    count = sum(parameter.numel() for parameter in NETS[name](**CIFAR).parameters())
    assert count == convolutions + norms + classifier
    assert round(count / 1e6, 2) == 0.27


def test_twenty_layers_with_weights_beside_the_norms(name):
    """The paper's 6n + 2 with n = 3."""
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in NETS[name](**CIFAR).modules()) == 20


class OptionA(nn.Module):
    """Every other pixel, entry by entry; new channels are zero, half of them before and half behind."""

    def forward(self, x):
        batch, channels, height, width = x.shape
        out = torch.zeros(batch, 2 * channels, (height + 1) // 2, (width + 1) // 2, dtype=x.dtype)
        for channel in range(channels):
            for row in range(out.shape[2]):
                for column in range(out.shape[3]):
                    out[:, channels // 2 + channel, row, column] = x[:, channel, 2 * row, 2 * column]
        return out


def twin(norm):
    """The same network of torchvision's residual blocks; its parameters come in the same order."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(3):
            grows = outputs != inputs
            shortcut = OptionA() if grows else None
            layers.append(BasicBlock(inputs, outputs, 2 if grows else 1, downsample=shortcut, norm_layer=norm))
            inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_torchvisions_blocks_compute(name, training):
    """Catches a norm or ReLU too many or at the wrong place, a wrong stride, and channels padded on one side alone."""
    net = NETS[name](**CIFAR).double().train(training)
    norm = nn.BatchNorm2d if name == "resnet20-bn" else lambda channels: nn.GroupNorm(2, channels)
    other = twin(norm).double().train(training)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            mine.copy_(torch.randn(mine.shape, generator=generator) / mine[0].numel() ** 0.5)  # norms' gains too
            theirs.copy_(mine)
    x = torch.rand((3, 3, 32, 32), generator=generator).double()
    with torch.no_grad():
        assert torch.allclose(net(x), other((x - 0.5) / 0.25), rtol=1e-10, atol=1e-10)


def test_each_residual_block_can_end_the_head():
    names = block_names(NETS["resnet20"](**CIFAR))
    assert names == ("normalize", "conv1", *(f"block{n}" for n in range(1, 10)), "pool", "classifier")


def test_group_norm_keeps_records_apart_and_batch_norm_does_not():
    """What a record's activations are must not depend on the rest of its batch: the reason for the default."""
    x = torch.rand((4, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    apart, mixing = (NETS[name](**CIFAR).double().train() for name in ("resnet20", "resnet20-bn"))
    assert torch.allclose(apart(x.double())[:1], apart(x[:1].double()), atol=1e-12)
    assert not torch.allclose(mixing(x.double())[:1], mixing(x[:1].double()), atol=1e-3)
