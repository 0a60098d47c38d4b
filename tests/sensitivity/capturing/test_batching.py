import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sensitivity import UnsupportedModuleError, certify


class Branching(nn.Module):
    """Multiplies by 100 in batches that `rule` picks by their size."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, x):
        return 100.0 * x if self.rule(x.shape[0]) else 1.0 * x


@pytest.mark.parametrize(
    "rule",
    [
        lambda n: n == 1,
        lambda n: n > 500,
        lambda n: n == 64,
        lambda n: n % 2 == 0,
        lambda n: n < 13,
        lambda n: int(n) == 13,
    ],
)
def test_heads_that_branch_on_the_batch_size_are_refused(rule):
    """Mutation caught: recording one batch size only, which certifies 1 where other sizes have 100."""
    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(Branching(rule), p=1, q=1, input_shape=(3,))


def test_scaling_by_the_batch_size_is_refused():
    class Averaged(nn.Module):
        def forward(self, x):
            return x / x.shape[0]

    with pytest.raises(UnsupportedModuleError, match=r"batch size|no real number"):
        certify(Averaged(), p=1, q=1, input_shape=(3,))


def test_squeezing_a_batch_of_one_is_refused():
    class Squeezed(nn.Module):
        def forward(self, x):
            return x.squeeze()

    with pytest.raises(UnsupportedModuleError, match="1 record"):
        certify(Squeezed(), p=1, q=1, input_shape=(3,))


def test_python_randomness_is_refused():
    class Rolling(nn.Module):
        def forward(self, x):
            return x * random.random()

    with pytest.raises(UnsupportedModuleError, match="draws random numbers"):
        certify(Rolling(), p=1, q=1, input_shape=(3,))


def test_no_verdict_outlives_the_program():
    """Mutation caught: remembering verdicts by less than all that forward reads."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.limit = 10**9

        def forward(self, x):
            return 100.0 * x if x.shape[0] > self.limit else 1.0 * x

    class TrainingOnly(nn.Module):
        def forward(self, x):
            return 100.0 * x if self.training and x.shape[0] > 500 else 1.0 * x

    class Plain(nn.Module):
        def forward(self, x):
            return 1.0 * x

    head = Plain()
    assert certify(head, p=1, q=1, input_shape=(3,)).value == 1.0
    head.forward = lambda x: 100.0 * x if x.shape[0] > 500 else 1.0 * x
    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(head, p=1, q=1, input_shape=(3,))
    training_only = TrainingOnly().eval()
    assert certify(training_only, p=1, q=1, input_shape=(3,)).value == 1.0
    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(training_only.train(), p=1, q=1, input_shape=(3,))
    limit = [10**9]
    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(Branching(lambda n: n > limit[0]), p=1, q=1, input_shape=(3,))
    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(Scaled(), p=1, q=1, input_shape=(3,))


def test_new_weights_are_certified_afresh():
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    assert certify(head, p=1, q=1, input_shape=(2,)).value == pytest.approx(1.0, rel=1e-12)
    head.weight.data *= 3.0
    assert certify(head, p=1, q=1, input_shape=(2,)).value == pytest.approx(3.0, rel=1e-12)


def test_a_changed_constant_is_seen_each_time():
    class Closed(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    head = Closed()
    assert certify(head, p=1, q=1, input_shape=(2,)).value == 1.0
    head.scale = 7.0
    assert certify(head, p=1, q=1, input_shape=(2,)).value == 7.0


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / torch.ones(x.shape[0]).sum(),
        lambda x: x * torch.full((), x.shape[0]),
        lambda x: x * max(1, x.shape[0] // 14),
        lambda x: x * (x.shape[0] // 14 + 1),
        lambda x: x * torch.where(torch.full((), x.shape[0]) > 100, 100.0, 1.0),
        lambda x: -F.leaky_relu(-x, x.shape[0] // 14 * 5.0),
        lambda x: x * torch.tensor(x.shape[0]),
        lambda x: x * torch.arange(x.shape[0]).max(),
        lambda x: torch.add(x, x, alpha=x.shape[0] // 14),
        lambda x: F.linear(x, torch.eye(4) * torch.full((), x.shape[0])),
        lambda x: x * (x.numel() // 100 + 1),
        lambda x: x * (len(x) // 14 + 1),
        lambda x: x * (100.0 if str(x.shape[0]) == "64" else 1.0),
        lambda x: x * (100.0 if f"{x.shape[0] // 2}" == "32" else 1.0),
        lambda x: x * (100.0 if repr(x.shape) == "torch.Size([64, 4])" else 1.0),
        lambda x: x * {64: 100.0}.get(x.shape[0], 1.0),
        lambda x: x * (100.0 if x.shape == (64, 4) else 1.0),
        lambda x: x * max(1.0, math.sqrt(x.shape[0]) - 10),
        lambda x: x * (100.0 if isinstance(x.shape[0], int) and x.shape[0] > 100 else 1.0),
        lambda x: 100.0 * x if not torch.compiler.is_compiling() and x.shape[0] > 100 else x,
        lambda x: x * (100.0 if x.untyped_storage().nbytes() > 10**4 else 1.0),
        lambda x: x.view(-1, 1 + x.shape[0] // 26, 4).transpose(1, 2).reshape(x.shape[0], 4),
        lambda x: x * (torch.mm(x, x.t()).shape[1] // 14 + 1),
    ],
)
def test_the_batch_size_cannot_reach_the_output_by_any_road(function):
    """Mutations caught: comparing constants by shape; letting a size into an operator's arguments without a guard."""
    with pytest.raises(UnsupportedModuleError):
        certify(Function(function), p=1, q=1, input_shape=4)


@pytest.mark.parametrize("name", ["sizes", "lookup"])
def test_swallowing_the_refusal_does_not_help(name):
    def sizes(x):
        try:
            return x * (100.0 if str(x.shape[0]) == "64" else 1.0)
        except ValueError:
            return x

    def lookup(x):
        try:
            return x * {64: 100.0}[x.shape[0]]
        except Exception:
            return x

    with pytest.raises(UnsupportedModuleError, match="batch size"):
        certify(Function(locals()[name]), p=1, q=1, input_shape=4)


def test_branches_on_a_buffer_and_the_batch_size_are_refused_once_the_buffer_allows_them():
    """Mutation caught: a verdict that was given for another value of the buffer."""

    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("flag", torch.tensor(0.0))

        def forward(self, x):
            try:
                flag = float(self.flag)
            except Exception:
                flag = 0.0
            return 100.0 * x if flag > 0 and x.shape[0] > 100 else x

    head = Flagged()
    assert certify(head, p=1, q=1, input_shape=4).value == 1.0
    head.flag.fill_(1.0)
    with pytest.raises(UnsupportedModuleError, match="branches on the batch size"):
        certify(head, p=1, q=1, input_shape=4)


def in_place_on_contiguous(x):
    y = x.contiguous()
    y.mul_(0.01)
    return x


def in_place_on_reshape(x):
    y = x * 1.0
    y.reshape(-1, 2, 2).mul_(0.01)
    return y


@pytest.mark.parametrize(
    "function",
    [
        in_place_on_contiguous,
        in_place_on_reshape,
        lambda x: x if x.is_contiguous() else 100.0 * x,
        lambda x: x * (100.0 if x.stride(0) != 4 else 1.0),
    ],
)
def test_heads_that_depend_on_the_layout_of_memory_are_refused(function):
    """Mutation caught: recording contiguous batches only, which certifies 0.01 where a transposed batch has 1."""
    with pytest.raises(UnsupportedModuleError):
        certify(Function(function), p=1, q=1, input_shape=4)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3)), (1, 8, 8)),
        (nn.Sequential(nn.Linear(4, 13), nn.BatchNorm1d(13)), (4,)),
        (nn.Sequential(nn.Conv2d(1, 13, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(13)), (1, 8, 8)),
        (nn.Sequential(nn.Conv2d(1, 31, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(279, 13)), (1, 8, 8)),
        (Function(lambda x: F.relu_(F.conv2d(x, torch.ones(2, 1, 3, 3))).view(x.size(0), -1)), (1, 8, 8)),
        (Function(lambda x: x.permute(0, 2, 1).reshape(x.shape[0], -1)), (3, 4)),
        (Function(lambda x: x.view(-1, 2, 2).unflatten(1, (1, 2)).contiguous()), (4,)),
    ],
)
def test_ordinary_heads_are_not_mistaken_for_ones_that_mix_batches(head, shape):
    """Mutation caught: taking a channel count of 1, 13 or 31 for the batch size."""
    assert certify(head.eval(), p=1, q=1, input_shape=shape).value > 0.0
