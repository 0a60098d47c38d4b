"""Constants that a head makes, changes or draws in forward."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def decayed(x):
    c = torch.ones(()) * 8
    for _ in range(3):
        x = torch.relu(x * c)
        c *= 0.5
    return x


def scratch(x):
    weight = torch.eye(4) * 50
    y = F.linear(x, weight)
    weight.zero_()
    return y


def numpy_memory(x):
    array = np.full(4, 100.0, dtype=np.float32)
    y = x * torch.from_numpy(array)
    array[:] = 1.0
    return y


def variance(x):
    v = torch.full((4,), 1e-4)
    y = F.batch_norm(x, torch.zeros(4), v, eps=0.0)
    v.fill_(1.0)
    return y


@pytest.mark.parametrize(
    ("function", "truth"), [(decayed, 64.0), (scratch, 50.0), (numpy_memory, 100.0), (variance, 100.0)]
)
def test_constants_count_with_the_value_that_they_had_when_used(function, truth):
    """Mutation caught: recording a reference to a constant that the head overwrites later (1, 0, 1 and 1)."""
    value = certify(Function(function), p=1, q=1, input_shape=4).value
    assert truth * (1 - 1e-7) <= value <= truth * (1 + 1e-6)
    x = torch.zeros(2, 4)
    x[1, 0] = 1.0
    y = Function(function)(x)
    assert float((y[1] - y[0]).abs().sum()) <= value * (1 + 1e-6)


def counted():
    counter = itertools.count(1)
    return lambda x: x * torch.full((), float(next(counter)))


def drawn():
    generator = np.random.default_rng(0)
    return lambda x: x * torch.as_tensor(generator.random(4), dtype=x.dtype)


@pytest.mark.parametrize(
    "function",
    [
        counted(),
        drawn(),
        lambda x: x * torch.as_tensor(np.random.rand(4), dtype=x.dtype),  # noqa: NPY002
        lambda x: x * torch.tensor(random.random()),
        lambda x: x * torch.full((), time.perf_counter(), dtype=torch.float64),
        lambda x: x * torch.empty(4),
        lambda x: x * torch.empty(4, dtype=torch.int64),
        lambda x: F.linear(x, torch.Tensor(4, 4)),
    ],
)
def test_constants_that_differ_from_run_to_run_are_refused(function):
    """Mutation caught: comparing constants of two recordings by shape."""
    with pytest.raises(UnsupportedModuleError):
        certify(Function(function), p=1, q=1, input_shape=4)


def test_random_states_of_python_and_numpy_stay_where_they_were():
    python_state, numpy_state = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for function in (lambda x: x * random.random(), lambda x: x * np.random.rand()):  # noqa: NPY002
        with pytest.raises(UnsupportedModuleError, match="draws random numbers"):
            certify(Function(function), p=1, q=1, input_shape=4)
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, x):
        self.last = x
        return self.layer(x)


class Collecting(Keeping):
    def forward(self, x):
        self.seen.append(x)
        return self.layer(x)


class Replacing(Keeping):
    def forward(self, x):
        self.buffer = x
        return self.layer(x)


@pytest.mark.parametrize(("kind", "name"), [(Keeping, "last"), (Collecting, "seen"), (Replacing, "_buffers")])
def test_heads_that_keep_activations_are_refused_by_attribute_and_left_clean(kind, name):
    """Mutation caught: leaving a recorded tensor in the head, which the next run trips over."""
    head = kind()
    for _ in range(2):
        with pytest.raises(UnsupportedModuleError, match=rf"changes itself in forward \(attribute '{name}'\)"):
            certify(head, p=1, q=1, input_shape=4)
    assert "last" not in head.__dict__
    assert head.seen == []
    assert type(head.buffer) is torch.Tensor
    assert head(torch.zeros(2, 4)).shape == (2, 4)
