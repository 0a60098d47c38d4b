"""Plain modules: what torch itself made keeps nothing; whatever could keep something is not called plain."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from asfl_privacy.mechanisms.plain_modules import is_plain
from asfl_privacy.models.nets import Normalize, lenet, small_cnn


@pytest.mark.parametrize("make", [small_cnn, lenet])
def test_the_projects_own_networks_are_plain(make):
    net = make(input_shape=(1, 28, 28), num_classes=10, mean=(0.3,), std=(0.3,))
    assert is_plain(net, also=(Normalize,))
    assert not is_plain(net)


class Keeping(nn.ReLU):
    def forward(self, x):
        self.kept = x.detach()
        return super().forward(x)


def hooked(register):
    layer = nn.Linear(2, 2)
    getattr(layer, register)(lambda *arguments: None)
    return layer


def with_forward():
    layer = nn.ReLU()
    layer.forward = lambda x: x
    return layer


def with_a_hooked_parameter():
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: None)
    return layer


def with_an_accumulating_parameter():
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return layer


REGISTRIES = {"_parameters", "_buffers", "_modules"}

HOOKS = [
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_state_dict_post_hook",
]  # fmt: skip


@pytest.mark.parametrize(
    "layer",
    [
        Keeping(),
        with_forward(),
        with_a_hooked_parameter(),
        with_an_accumulating_parameter(),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.TransformerEncoderLayer(4, 1, 8),  # holds a function of the user's
        *(hooked(name) for name in HOOKS),
    ],
)
def test_what_could_keep_a_record_is_not_plain(layer):
    assert not is_plain(nn.Sequential(OrderedDict(first=nn.Identity(), second=layer)))


def test_a_global_hook_makes_nothing_plain():
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        assert not is_plain(nn.ReLU())
    finally:
        handle.remove()
    assert is_plain(nn.ReLU())


def test_plain_layers_hold_nothing_after_a_step_that_they_did_not_hold_before():
    """The claim, on one layer of every kind that a batch of images can pass; catches a torch layer that keeps its input."""
    layers = [
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4),
        nn.MaxPool2d(2, stride=1), nn.AvgPool2d(2, stride=1), nn.AdaptiveAvgPool2d(6), nn.ReLU(), nn.GELU(), nn.PReLU(),
        nn.Dropout(0.1), nn.ZeroPad2d(1), nn.Upsample(8), nn.PixelUnshuffle(2), nn.Flatten(), nn.LayerNorm(256),
        nn.Linear(256, 12), nn.Softplus(), nn.Unflatten(1, (3, 4)), nn.Softmax(dim=2), nn.Flatten(), nn.Linear(12, 2),
    ]  # fmt: skip
    net = nn.Sequential(*layers)
    assert is_plain(net)
    before = [set(vars(module)) for module in net.modules()]
    held = [repr({name: value for name, value in vars(m).items() if name not in REGISTRIES}) for m in net.modules()]
    net(torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert [set(vars(module)) for module in net.modules()] == before
    assert [
        repr({name: value for name, value in vars(m).items() if name not in REGISTRIES}) for m in net.modules()
    ] == held
