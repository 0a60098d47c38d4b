"""Which networks are trained at once, and why the others are not."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from asfl_privacy.federated import batched_steps
from asfl_privacy.federated.batching_support import supports_batching
from asfl_privacy.federated.steps import Pool
from asfl_privacy.mechanisms import Gaussian, NoiseLayer
from asfl_privacy.models.nets import lenet, small_cnn

POOL = Pool(inputs=torch.full((5, 1, 8, 8), float("nan")), labels=torch.zeros(5, dtype=torch.int64))


class Through(nn.Module):
    """A block that does to its input what it is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Remembers(nn.Module):
    def forward(self, x):
        self.last = x.detach()
        return x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x / self.calls


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.inner(x)


def net(*blocks):
    return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 3))


def tied():
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return net(first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_cnn(input_shape=(1, 8, 8), num_classes=10, mean=(0.5,), std=(0.5,)),
        lambda: lenet(input_shape=(1, 8, 8), num_classes=10, mean=(0.5,), std=(0.5,)).double(),
        lambda: net(nn.BatchNorm1d(64)),
        lambda: net(nn.Dropout(0.5).eval()),
        lambda: net(Residual()),
        lambda: net(Through(torch.sin)),
        lambda: net(Residual(), nn.BatchNorm1d(64), nn.PReLU()),
        lambda: net(nn.Unflatten(1, (4, 16)), nn.Softmax(2), nn.Flatten()),
    ],
)
def test_networks_that_are_trained_at_once(make):
    model = make()
    values = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    inputs = POOL.inputs.to(next(model.parameters()).dtype)
    assert supports_batching(model, Pool(inputs=inputs, labels=POOL.labels)) is None
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: net(nn.Dropout(0.1)), "layer 1 is Dropout: it draws"),
        (lambda: net(nn.RReLU()), "layer 1 is RReLU: it draws"),
        (lambda: net(NoiseLayer(Gaussian(noise_stddev=1.0))), "layer 1 is NoiseLayer: it draws"),
        (lambda: net(Through(lambda x: F.dropout(x, 0.5))), "moves torch's generator"),
        (lambda: net(Through(lambda x: x + torch.randn(64))), "moves torch's generator"),
        (lambda: net(nn.MultiheadAttention(64, 1, dropout=0.5)), "failed"),
        (lambda: net(Remembers()), "changed itself"),
        (lambda: net(Counts()), "changed itself"),
        (lambda: net(nn.BatchNorm1d(64, momentum=None)), "failed"),
        (lambda: net(Through(lambda x: x * x.sum().item())), "failed"),
        (lambda: net(Through(lambda x: x if x.sum() > 0 else -x)), "failed"),
        (lambda: net(Through(lambda x: x.detach().requires_grad_())), "failed|differs"),
        (tied, "shared by several modules"),
        (lambda: net().half(), "float16"),
        (lambda: net().requires_grad_(False), "no parameter trains"),
        (lambda: net(nn.Linear(63, 64)), "failed"),
    ],
)
def test_reasons_why_a_network_is_not(make, reason):
    """Catches: draws that differ, state that all clients would share, values that only one client's run can see."""
    model = make()
    state = torch.get_rng_state()
    found = supports_batching(model, POOL)
    assert torch.equal(torch.get_rng_state(), state)
    assert found is not None
    assert re.search(reason, found), found


def test_a_generator_that_a_block_holds_is_not_advanced():
    for generator in (np.random.default_rng(0), np.random.RandomState(0), torch.Generator().manual_seed(0)):
        block = Through(lambda x: x)
        block.source = generator
        before = (
            generator.get_state() if not isinstance(generator, np.random.Generator) else generator.bit_generator.state
        )
        assert "draws from a generator" in supports_batching(net(block), POOL)
        after = (
            generator.get_state() if not isinstance(generator, np.random.Generator) else generator.bit_generator.state
        )
        assert str(before) == str(after)


def test_a_layer_that_computes_something_else_is_found(monkeypatch):
    """Mutant: the loss that batched steps take is twice the right one."""
    right = batched_steps._loss
    monkeypatch.setattr(batched_steps, "_loss", lambda logits, targets: 2 * right(logits, targets))
    assert "differs by" in supports_batching(net(), POOL)
