"""Networks with blocks that keep, share or draw what others do not; tests name them as `odd_nets:factory`."""

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

WIDTH = 16


def network(tail, *, input_shape):
    size = input_shape[0] * input_shape[1] * input_shape[2]
    head = nn.Sequential(nn.Flatten(), nn.Linear(size, WIDTH), nn.ReLU())
    return nn.Sequential(OrderedDict(head=head, tail=tail))


class Last(nn.Module):
    """Adds a tenth of the mean of the batch before, kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros(WIDTH)

    def forward(self, x):
        y = x + 0.1 * self.last
        self.last = x.detach().mean(0)
        return y


class Count(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 1 / (1 + self.calls))


class Running(nn.Module):
    """A running mean that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        y = x - self.mean
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y


class Mask(nn.Module):
    """An attention mask with infinities, which training does not change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))

    def forward(self, x):
        y = x.view(-1, 4, 4)
        return (torch.softmax(y @ y.transpose(1, 2) + self.mask, -1) @ y).flatten(1)


class AlwaysDrops(nn.Module):
    """Dropout in evaluation too."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, True)


class DrawsFromNumPy(nn.Module):
    """Noise that no seed of torch reaches."""

    def forward(self, x):
        return x * float(1 + 0.1 * np.random.rand())  # noqa: NPY002


class Extra(nn.Module):
    """State outside parameters and buffers, by torch's own hook for it."""

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass

    def forward(self, x):
        return x


class Complex(nn.Module):
    """A complex buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("z", torch.tensor([1.0 + 2.0j]))

    def forward(self, x):
        return x * self.z.abs()


def _factory(make):
    def factory(*, input_shape, num_classes):
        return network(nn.Sequential(make(), nn.Linear(WIDTH, num_classes)), input_shape=input_shape)

    return factory


last, count, running, mask = _factory(Last), _factory(Count), _factory(Running), _factory(Mask)
always_drops, draws_from_numpy = _factory(AlwaysDrops), _factory(DrawsFromNumPy)
extra, complex_buffer = _factory(Extra), _factory(Complex)


def unsaved_statistics(*, input_shape, num_classes):
    """Batch norm whose statistics are in no state dict."""
    norm = nn.BatchNorm1d(WIDTH)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        value = getattr(norm, name)
        delattr(norm, name)
        norm.register_buffer(name, value, persistent=False)
    return network(nn.Sequential(norm, nn.Linear(WIDTH, num_classes)), input_shape=input_shape)


def shares_memory(*, input_shape, num_classes):
    """Two parameters in one memory, one transposed: a tie that copies lose."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = nn.Parameter(first.weight.data.t())
    return network(nn.Sequential(first, second, nn.Linear(WIDTH, num_classes)), input_shape=input_shape)


def shares_parameter(*, input_shape, num_classes):
    """The same parameter twice: a tie that copies keep."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return network(nn.Sequential(first, second, nn.Linear(WIDTH, num_classes)), input_shape=input_shape)
