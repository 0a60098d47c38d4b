import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity.smoothing import SoftenedKinks

KINKED = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "relu6": F.relu6,
    "abs": torch.abs,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "hardtanh with ends": lambda x: F.hardtanh(x, -2.0, 0.5),
    "clamp": lambda x: x.clamp(min=-0.3),
    "clamp on both sides": lambda x: torch.clamp(x, -0.3, 0.7),
}


@pytest.mark.parametrize("function", KINKED.values(), ids=KINKED)
def test_a_softened_kink_nears_the_kink_as_it_sharpens_and_has_slope_between(function):
    x = torch.linspace(-3.0, 3.0, 101, dtype=torch.float64)[None].requires_grad_(True)
    kinks = SoftenedKinks()
    errors = []
    for softening in (0.3, 0.03, 0.003):
        with kinks.softened(softening):
            soft = function(x)
        assert kinks.seen
        errors.append(float((soft - function(x)).abs().max().detach()))
    assert errors[0] > 0.0
    assert errors[2] < errors[1] / 2 < errors[0] / 4
    (slopes,) = torch.autograd.grad(soft.sum(), x)
    assert len(slopes.unique()) > 3  # a kink has two slopes


def test_a_smooth_net_is_left_as_it_is():
    net, kinks, x = nn.Sequential(nn.Linear(3, 3), nn.GELU()), SoftenedKinks(), torch.randn(2, 3, requires_grad=True)
    with kinks.softened(1.0):
        assert torch.equal(net(x), net(x))
    assert not kinks.seen


def test_no_softening_leaves_kinks_as_they_are():
    x = torch.randn(2, 3, requires_grad=True)
    with SoftenedKinks().softened(0.0):
        assert torch.equal(F.relu(x), x.clamp_min(0.0))
