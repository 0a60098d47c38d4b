"""Networks that tests name as `own_nets:factory`."""

from collections import OrderedDict

from torch import nn


def norm_and_dropout(*, input_shape, num_classes):
    """A head with frozen batch norm and dropout, a tail with batch norm and dropout in training mode."""
    size = input_shape[0] * input_shape[1] * input_shape[2]
    head = nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
    head[2].eval()
    tail = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, num_classes))
    return nn.Sequential(OrderedDict(head=head, tail=tail))


def unused_parameter(*, input_shape, num_classes):
    """A parameter that forward never reads stays as it is."""
    net = norm_and_dropout(input_shape=input_shape, num_classes=num_classes)
    net.tail[0].extra = nn.Parameter(net.tail[0].bias.detach().clone())
    return net


class Keeps(nn.Module):
    """Sends what it kept of the batch before in place of this one's."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        output = x if self.kept is None else self.kept.expand_as(x)
        self.kept = x.mean(0, keepdim=True).detach()
        return output


def keeps(*, input_shape, num_classes):
    """A head with a block that remembers."""
    size = input_shape[0] * input_shape[1] * input_shape[2]
    head = nn.Sequential(Keeps(), nn.Flatten(), nn.Linear(size, 8))
    return nn.Sequential(OrderedDict(head=head, out=nn.Linear(8, num_classes)))


def in_place(*, input_shape, num_classes):
    """A first block that works in place, as stock modules may."""
    size = input_shape[0] * input_shape[1] * input_shape[2]
    first = nn.Sequential(nn.Hardtanh(0.2, 0.4, inplace=True), nn.Flatten(), nn.Linear(size, 8), nn.ReLU())
    return nn.Sequential(OrderedDict(first=first, out=nn.Linear(8, num_classes)))
