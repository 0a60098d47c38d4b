import random

import pytest
import torch
from torch import nn

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

    with pytest.raises(UnsupportedModuleError, match="other operators"):
        certify(Rolling(), p=1, q=1, input_shape=(3,))


def test_the_remembered_verdict_never_outlives_the_program():
    """Mutations caught: a key without attributes, without closures, without modes, or without forward's code."""

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


def test_new_weights_alone_are_certified_afresh_without_a_new_export(monkeypatch):
    """Mutation caught: remembering the certificate, or the weights, with the verdict."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    assert certify(head, p=1, q=1, input_shape=(2,)).value == pytest.approx(1.0, rel=1e-12)

    def no_export(*args, **kwargs):
        raise AssertionError("exported again")

    monkeypatch.setattr(torch.export, "export", no_export)
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
